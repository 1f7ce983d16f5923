"""What libraries need besides a request: checks and lengths; and log probabilities in Baton's form."""

import itertools
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidRequest, NotResumable
from baton.messages import GenerateRequest, TokenLogprob
from workers.engines.library.model_facts import ModelFacts


def check_request(request: GenerateRequest, facts: ModelFacts, context_length: int) -> None:
    """Raise InvalidRequest for what an engine would fail on or silently truncate; NotResumable for the rest
    of an answer with a form, since its grammar would start anew.
    """
    num_tokens, num_generated = len(request.token_ids), request.num_generated
    if not num_tokens:
        raise InvalidRequest("the prompt is empty")
    if not 0 <= num_generated < num_tokens:
        raise InvalidRequest(f"num_generated ({num_generated}) must be from 0 to {num_tokens - 1}")
    if num_tokens >= context_length:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; with a context length of {context_length} "
            f"at most {context_length - 1} are allowed"
        )
    if num_left(request, context_length) < 1:
        raise InvalidRequest(
            f"max_tokens is {request.sampling.max_tokens}; {num_generated} tokens were already generated",
            param="max_tokens",
        )
    if num_generated and request.sampling.guided is not None:
        raise NotResumable(
            "the engine cannot go on in the middle of an answer with a demanded form; send the request again"
        )
    sampling = request.sampling
    if sampling.choice < 0 or (sampling.logprobs or 0) < 0:
        raise InvalidRequest("choice and logprobs must not be negative")
    if sampling.prompt_logprobs is not None and sampling.max_tokens > 1:
        raise InvalidRequest("prompt_logprobs are given with an answer of one token", param="max_tokens")
    token_ids = (*request.token_ids, *sampling.logit_bias, *sampling.stop_token_ids)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < facts.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in the model's vocabulary of {facts.vocab_size}"
            )


def num_left(request: GenerateRequest, context_length: int) -> int:
    """Tokens that may still be generated, within the context."""
    num_asked = request.sampling.max_tokens - request.num_generated
    return min(num_asked, context_length - len(request.token_ids))


_NO_LOGPROB = -9999.0  # OpenAI's value for "very unlikely", here for unreported ones


def token_logprobs(
    token_ids: Sequence[int], reported: Sequence[dict[int, Any]] | None, num_top: int
) -> tuple[TokenLogprob, ...]:
    """One entry per token, with its `num_top` likeliest; the last tokens may be unreported."""
    found = []
    for token_id, entries in zip(token_ids, itertools.chain(reported or (), itertools.repeat({}))):  # noqa: B905
        logprobs = {i: float(entry.logprob) for i, entry in entries.items()}
        best = sorted(logprobs.items(), key=lambda pair: -pair[1])
        found.append(TokenLogprob(token_id, logprobs.get(token_id, _NO_LOGPROB), tuple(best[:num_top])))
    return tuple(found)
