"""Builds a worker's Sampling from a request's fields: fills in defaults, checks against the model."""

from typing import TypeVar

from baton.errors import InvalidRequest
from baton.messages import Sampling
from frontend.text.served import ContextTooLong, ServedModel
from frontend.turn.fields import Nvext, SamplingFields
from frontend.turn.ids import new_seed
from frontend.turn.request import TurnRequest

# Prompt log probabilities travel in one worker message, and NATS limits those to 1 MB.
MAX_SCORED_TOKENS = 8192
_SEED_MASK = 2**63 - 1

T = TypeVar("T")


def sampling_of(request: TurnRequest, served: ServedModel, *, num_prompt_tokens: int) -> Sampling:
    """The sampling parameters for a prompt of that length; `max_tokens` is capped by the rest of the context.

    Raises ContextTooLong if the prompt fills the context, InvalidRequest if the fields contradict each other
    or name unknown token ids.
    """
    body = request.sampling
    _check_scored(request, num_prompt_tokens)
    room = _room(request, served, num_prompt_tokens)
    limit = min(request.max_tokens or room, room)
    min_tokens = body.min_tokens or 0
    if min_tokens > limit:
        raise InvalidRequest(
            f"`min_tokens` is {min_tokens}, but the answer is limited to {limit} tokens.", param="min_tokens"
        )
    nvext = body.nvext or Nvext()
    # `top_p` 0 means greedy sampling, but engines reject the value 0.
    greedy = body.top_p == 0 or nvext.greed_sampling
    return Sampling(
        max_tokens=limit,
        min_tokens=min_tokens,
        seed=new_seed() if body.seed is None else body.seed & _SEED_MASK,
        is_seeded=body.seed is not None,
        temperature=0.0 if greedy else _given(1.0, body.temperature),
        top_p=body.top_p or 1.0,
        top_k=max(0, _given(0, nvext.top_k, body.top_k)),
        min_p=_given(0.0, body.min_p),
        frequency_penalty=_given(0.0, body.frequency_penalty),
        presence_penalty=_given(0.0, body.presence_penalty),
        repetition_penalty=_given(1.0, nvext.repetition_penalty, body.repetition_penalty),
        logit_bias=_logit_bias(body, served),
        stop_token_ids=_stop_token_ids(body, served),
        ignore_eos=_given(False, nvext.ignore_eos, body.ignore_eos),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )


def _check_scored(request: TurnRequest, num_prompt_tokens: int) -> None:
    if request.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"`{request.path}` has {num_prompt_tokens} tokens; log probabilities are limited to prompts of "
            f"{MAX_SCORED_TOKENS} tokens.",
            param=request.path,
        )


def _room(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> int:
    """The maximum number of answer tokens, at least 1."""
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {served.context_length} tokens, but `{request.path}` "
            f"has {num_prompt_tokens} tokens. Shorten it to leave room for the answer.",
            param=request.path,
        )
    return room


def _given(default: T, *values: T | None) -> T:
    return next((value for value in values if value is not None), default)


def _logit_bias(body: SamplingFields, served: ServedModel) -> dict[int, float]:
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    served.tokenizer.checked(list(bias), served.name, "logit_bias")
    return bias


def _stop_token_ids(body: SamplingFields, served: ServedModel) -> tuple[int, ...]:
    own = served.tokenizer.checked(body.stop_token_ids or [], served.name, "stop_token_ids")
    return tuple(dict.fromkeys((*served.tokenizer.stop_token_ids, *own)))
