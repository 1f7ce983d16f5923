"""Prepares a request for generation: renders and tokenises the prompt, resolves sampling and constraints."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from frontend.harmony.conversation import Conversation
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.served import ContextTooLong, ServedModel
from frontend.text.tokenizer import TooManyTokens
from frontend.turn.choice import Choice, Reader
from frontend.turn.fields import Nvext, SamplingFields
from frontend.turn.form import demanded_form, guided, raw_guided, with_form
from frontend.turn.ids import new_seed
from frontend.turn.raw_text import RawText
from frontend.turn.request import Asker, RawPrompts, TurnRequest
from frontend.turn.thoughts import Encoded, Thoughts, encoded

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


# Longer prompts are rendered and tokenised in a thread, so that running streams do not stall.
LONG_BYTES = 8192


async def prepare(
    request: TurnRequest,
    asker: Asker,
    served: ServedModel,
    thoughts: Thoughts,
    check_load: Callable[[str, str, float], None],
    *,
    max_choices: int,
) -> list[Choice]:
    """The choices, prompt by prompt, ready to be generated. Reasoning that the client did not send back with
    its calls is restored from `thoughts`, and new reasoning is kept there. Raises a BatonError for requests
    that cannot be served; `check_load` is `TokenSource.check`, before work is spent on the prompt."""
    _check_num_choices(request, max_choices)
    caller = asker.caller(request.user)
    check_load(served.name, caller, asker.deadline_s)
    prompt = request.prompt
    if isinstance(prompt, RawPrompts):
        form = raw_guided(demanded_form(request.sampling, None))
    else:
        answer = demanded_form(request.sampling, prompt.answer_format)
        form = guided(prompt.tools, request.call_choice, answer)
    prompts = await encode(request, asker.owner, served, thoughts)
    sampling = sampling_of(
        request, served, num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts)
    )
    sampling = with_form(sampling, form)
    requests = _token_requests(request, asker, served.name, prompts, sampling)

    def keep(choice: Choice) -> None:
        is_whole = choice.finish_reason != "length" and not choice.repairs
        turn = choice.writing.turn(served.tokenizer) if is_whole else None
        if turn is not None:
            turn = msgspec.structs.replace(turn, current_date=prompts[0].current_date)
            thoughts.keep_turn(asker.owner, choice.call_ids, turn)
        else:
            thoughts.keep(asker.owner, choice.call_ids, choice.thought)

    choices = [_choice(request, token_request, served, caller, keep) for token_request in requests]
    choices[0].history = prompts[0].history
    return choices


async def encode(request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts) -> list[Encoded]:
    """The tokens of each prompt. Raises InvalidRequest if it cannot be rendered."""

    def made() -> list[Encoded]:
        prompt = request.prompt
        if not isinstance(prompt, Conversation):
            return _encoded(request, served)
        talk = thoughts.resumed(owner, prompt, served.current_date)
        return _encoded(msgspec.structs.replace(request, prompt=talk), served)

    return await asyncio.to_thread(made) if request.num_bytes > LONG_BYTES else made()


def _check_num_choices(request: TurnRequest, max_choices: int) -> None:
    num_prompts = len(request.prompt.prompts) if isinstance(request.prompt, RawPrompts) else 1
    num_choices = request.num_choices * num_prompts
    if num_choices > max_choices:
        raise InvalidRequest(
            f"`n` makes {num_choices} choices; at most {max_choices} are allowed.", param="n"
        )


def _encoded(request: TurnRequest, served: ServedModel) -> list[Encoded]:
    tokenizer = served.tokenizer
    limit = served.max_counted_tokens
    try:
        if isinstance(request.prompt, Conversation):
            of_talk = encoded(render(request.prompt), tokenizer, limit)
            return [msgspec.structs.replace(of_talk, current_date=request.prompt.current_date)]
        prompts = (
            tokenizer.encode_text(prompt, allow_special=True, limit=limit)
            if isinstance(prompt, str)
            else tokenizer.checked(prompt, served.name, request.path)
            for prompt in request.prompt.prompts
        )
        return [Encoded(token_ids=token_ids) for token_ids in prompts]
    except TooManyTokens:
        raise served.too_long(request.path) from None


def _token_requests(
    request: TurnRequest, asker: Asker, model: str, prompts: Sequence[Encoded], sampling: Sampling
) -> list[GenerateRequest]:
    """One per choice of each prompt. If there are several, their ids are `<request_id>-<index>`, since
    workers need unique ones."""
    requests = [
        GenerateRequest(
            request_id=asker.request_id,
            model=model,
            token_ids=prompt.token_ids,
            num_opening_tokens=prompt.num_opening_tokens,
            sampling=msgspec.structs.replace(sampling, choice=choice),
            deadline_s=asker.deadline_s,
            priority=request.sampling.priority or 0,
            cache_salt=asker.cache_salt(request.sampling.cache_salt),
        )
        for prompt in prompts
        for choice in range(request.num_choices)
    ]
    if len(requests) == 1:
        return requests
    return [msgspec.structs.replace(r, request_id=f"{r.request_id}-{i}") for i, r in enumerate(requests)]


def _choice(
    request: TurnRequest,
    token_request: GenerateRequest,
    served: ServedModel,
    caller: str,
    on_finish: Callable[[Choice], None],
) -> Choice:
    prompt = request.prompt
    reader: Reader
    text_tools: frozenset[str] = frozenset()
    # Raw text excludes any stop token; in a conversation, the parser consumes the model's own.
    cut_ids: Sequence[int] = request.sampling.stop_token_ids or ()
    if isinstance(prompt, Conversation):
        offered = frozenset(tool.called for tool in prompt.tools)
        text_tools = frozenset(t.called for t in prompt.tools if t.takes_text and t.grammar is None)
        may_call = request.call_choice.may_call and bool(prompt.tools)
        reader = HarmonyParser(served.tokenizer.vocabulary, offered, may_call=may_call)
    else:
        reader = RawText(served.tokenizer, shows_special=prompt.shows_special)
        cut_ids = token_request.sampling.stop_token_ids
    return Choice(
        token_request,
        reader,
        stop_strings=request.stop_strings,
        max_calls=request.max_calls,
        cut_ids=cut_ids,
        text_tools=text_tools,
        caller=caller,
        on_finish=on_finish,
    )
