"""A body's sampling fields as token requests: defaults filled in, checked against the model."""

import secrets
from typing import TypeVar

import msgspec

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from frontend.answers import ContextTooLong
from frontend.routing.fleet import ServedModel
from frontend.schema import ChatBody, Nvext, SamplingFields

_SEED_MASK = 2**63 - 1

T = TypeVar("T")


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request comes from, and how long it may take."""

    request_id: str
    deadline_s: float
    trace: str | None = None


def token_requests(
    asker: Asker,
    served: ServedModel,
    prompts: list[list[int]],
    sampling: Sampling,
    num_choices: int,
    *,
    priority: int | None,
) -> list[GenerateRequest]:
    """One request for each choice of each prompt, prompt by prompt.

    Several choices get ids of their own, `<request_id>-<index>`, since workers tell requests apart by them.
    """
    requests = [
        GenerateRequest(
            request_id=asker.request_id,
            model=served.name,
            token_ids=token_ids,
            sampling=msgspec.structs.replace(sampling, choice=choice),
            deadline_s=asker.deadline_s,
            priority=priority or 0,
            trace=asker.trace,
        )
        for token_ids in prompts
        for choice in range(num_choices)
    ]
    if len(requests) == 1:
        return requests
    return [msgspec.structs.replace(r, request_id=f"{r.request_id}-{i}") for i, r in enumerate(requests)]


def sampling_of(
    body: SamplingFields,
    served: ServedModel,
    *,
    num_prompt_tokens: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> Sampling:
    """How to choose the tokens of a prompt's answer.

    `max_tokens` None is all that the context leaves, and more than that is cut to it. Raises ContextTooLong
    if it leaves nothing, InvalidRequest if the fields contradict each other or name unknown token ids.
    """
    room = _room(body, served, num_prompt_tokens)
    limit = min(max_tokens or room, room)
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
        logprobs=logprobs,
    )


def _room(body: SamplingFields, served: ServedModel, num_prompt_tokens: int) -> int:
    """Tokens that an answer can have; one at least."""
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"The prompt has {num_prompt_tokens} tokens; the context of {served.name} is "
            f"{served.context_length} tokens, prompt and answer together. Shorten it.",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    return room


def _given(default: T, *values: T | None) -> T:
    return next((value for value in values if value is not None), default)


def _logit_bias(body: SamplingFields, served: ServedModel) -> dict[int, float]:
    bias = {int(name): value for name, value in (body.logit_bias or {}).items()}
    return {_known_id(token_id, served, "logit_bias"): value for token_id, value in bias.items()}


def _stop_token_ids(body: SamplingFields, served: ServedModel) -> tuple[int, ...]:
    own = [_known_id(token_id, served, "stop_token_ids") for token_id in body.stop_token_ids or ()]
    return tuple(dict.fromkeys((*served.tokenizer.stop_token_ids, *own)))


def _known_id(token_id: int, served: ServedModel, field: str) -> int:
    if token_id >= served.tokenizer.vocab_size:
        raise InvalidRequest(
            f"`{field}` names token {token_id}; {served.name} has {served.tokenizer.vocab_size} tokens.",
            param=field,
        )
    return token_id
