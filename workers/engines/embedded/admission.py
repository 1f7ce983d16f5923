"""Admission checks: turns a request into a sequence for the scheduler, or refuses it."""

from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest
from workers.engines.embedded.scheduler import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one request. `max_prompt_tokens` None: prompts are chunked, so any length fits. It
    does not hold for a resumed answer, whose prompt was accepted before.
    """

    context_length: int
    vocab_size: int
    max_prompt_tokens: int | None


def new_sequence(request: GenerateRequest, limits: Limits, *, hands_off: bool) -> Sequence:
    """A waiting sequence with the number of blocks to reserve: for its whole answer or, if it hands off, its
    prompt.

    Raises InvalidRequest.
    """
    _check_lengths(request, limits)
    _check_tokens(request, limits.vocab_size)
    sampling = request.sampling
    if min(sampling.choice, sampling.logprobs or 0, sampling.prompt_logprobs or 0) < 0:
        raise InvalidRequest("choice and logprobs must not be negative")
    if sampling.prompt_logprobs is not None and sampling.max_tokens > 1:
        raise InvalidRequest("prompt_logprobs need an answer of at most one token", param="max_tokens")
    num_tokens = len(request.token_ids)
    num_left = sampling.max_tokens - request.num_generated
    return Sequence(
        token_ids=list(request.token_ids),
        num_prompt=num_tokens - request.num_generated,
        sampling=sampling,
        num_reserved=num_tokens if hands_off else min(num_tokens + num_left, limits.context_length),
        pulls_kv=request.handoff is not None and not hands_off,
        hands_off=hands_off,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _check_lengths(request: GenerateRequest, limits: Limits) -> None:
    num_tokens = len(request.token_ids)
    if num_tokens == 0:
        raise InvalidRequest("the prompt is empty")
    if not 0 <= request.num_generated < num_tokens:
        raise InvalidRequest(f"{request.num_generated} of {num_tokens} tokens cannot be generated ones")
    if num_tokens >= limits.context_length:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; with a context length of {limits.context_length} "
            f"at most {limits.context_length - 1} are allowed",
        )
    longest = limits.max_prompt_tokens
    is_new = request.num_generated == 0 and request.handoff is None
    if longest is not None and num_tokens > longest and is_new:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; without enable_chunked_prefill at most max_num_tokens "
            f"({longest}) are allowed",
        )
    if request.sampling.max_tokens <= request.num_generated:
        raise InvalidRequest(
            f"max_tokens is {request.sampling.max_tokens}; "
            f"{request.num_generated} tokens were already generated",
            param="max_tokens",
        )


def _check_tokens(request: GenerateRequest, vocab_size: int) -> None:
    """Raise InvalidRequest for unknown token ids, which would fail the whole batch."""
    sampling = request.sampling
    lowest = min(*request.token_ids, *sampling.logit_bias, 0)
    highest = max(*request.token_ids, *sampling.logit_bias, 0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(f"token id {wrong} is not in the model's vocabulary of {vocab_size}")
