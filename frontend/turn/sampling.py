"""A request's sampling fields as a worker's Sampling: defaults filled in, checked against the model."""

import secrets
from typing import TypeVar

from baton.errors import InvalidRequest
from baton.messages import Sampling
from frontend.text.served import ContextTooLong, ServedModel
from frontend.turn.fields import Nvext, SamplingFields
from frontend.turn.request import TurnRequest

# Their log probabilities come in one message of a worker's, and NATS takes 1 MB.
MAX_SCORED_TOKENS = 8192
_SEED_MASK = 2**63 - 1

T = TypeVar("T")


def sampling_of(request: TurnRequest, served: ServedModel, *, num_prompt_tokens: int) -> Sampling:
    """How to choose the tokens of an answer to a prompt of that length; `max_tokens` is cut to the room that
    the context leaves.

    Raises ContextTooLong if it leaves nothing, InvalidRequest if the fields contradict each other or name
    unknown token ids.
    """
    body = request.sampling
    _check_scored(request, num_prompt_tokens)
    room = _room(request, served, num_prompt_tokens)
    limit = min(request.max_tokens or room, room)
    min_tokens = body.min_tokens or 0
    if min_tokens > limit:
        raise InvalidRequest(
            f"`min_tokens` is {min_tokens}, but the answer can have {limit} at most.", param="min_tokens"
        )
    nvext = body.nvext or Nvext()
    # A nucleus of no probability is its likeliest token: greedy. Engines refuse to be told so by a 0.
    greedy = body.top_p == 0 or nvext.greed_sampling
    return Sampling(
        max_tokens=limit,
        min_tokens=min_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
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
            f"`{request.path}` has {num_prompt_tokens} tokens; log probabilities are given for "
            f"{MAX_SCORED_TOKENS} at most.",
            param=request.path,
        )


def _room(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> int:
    """Tokens that an answer can have; one at least."""
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"The prompt has {num_prompt_tokens} tokens; the context of {served.name} is "
            f"{served.context_length} tokens, prompt and answer together. Shorten it.",
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
