"""What any engine of somebody else's must refuse, or reckon, of a request before it gets it."""

from baton.errors import EngineFailure, InvalidRequest
from baton.messages import GenerateRequest, Sampling
from workers.engines.model_facts import ModelFacts

_SEED_BITS = (1 << 63) - 1
# Odd numbers of high entropy (golden ratio, square root of 3): seeds of choices and attempts lie far apart.
_CHOICE_STEP = 0x1E3779B97F4A7C15
_RESUME_STEP = 0x3504F333F9DE6485


def check_request(request: GenerateRequest, facts: ModelFacts, context_length: int) -> None:
    """Raise InvalidRequest for what an engine would break on, or cut short without a word; EngineFailure
    for an answer with a form that was begun elsewhere: its grammar would start anew in the middle.
    """
    num_tokens, num_generated = len(request.token_ids), request.num_generated
    if not num_tokens:
        raise InvalidRequest("the prompt has no token")
    if not 0 <= num_generated < num_tokens:
        raise InvalidRequest(f"of {num_tokens} tokens, {num_generated} cannot be generated ones")
    if num_tokens >= context_length:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; the context of {context_length} holds "
            f"{context_length - 1} and an answer"
        )
    if num_left(request, context_length) < 1:
        raise InvalidRequest(
            f"max_tokens is {request.sampling.max_tokens}; {num_generated} tokens exist already",
            param="max_tokens",
        )
    if num_generated and request.sampling.guided is not None:
        raise EngineFailure(
            "the worker was lost, and the engine cannot go on with an answer whose form is demanded; "
            "send the request again"
        )
    asked = request.sampling
    if asked.choice < 0 or (asked.logprobs or 0) < 0:
        raise InvalidRequest("choice and logprobs must not be negative")
    if asked.prompt_logprobs is not None and asked.max_tokens > 1:
        raise InvalidRequest("prompt_logprobs are given with an answer of one token", param="max_tokens")
    for token_id in (*request.token_ids, *asked.logit_bias, *asked.stop_token_ids):
        if not 0 <= token_id < facts.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in the model's vocabulary of {facts.vocab_size}"
            )


def num_left(request: GenerateRequest, context_length: int) -> int:
    """Tokens that may still be generated: what was asked for, within the context."""
    num_asked = request.sampling.max_tokens - request.num_generated
    return min(num_asked, context_length - len(request.token_ids))


def seed_of_attempt(sampling: Sampling, num_generated: int) -> int:
    """A seed of 63 bits for an engine whose sampling is not positional: the request's own for the first
    attempt at the first choice.
    """
    return (sampling.seed + sampling.choice * _CHOICE_STEP + num_generated * _RESUME_STEP) & _SEED_BITS
