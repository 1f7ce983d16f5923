"""Prepares a request for generation: renders and tokenises the prompt, resolves sampling and constraints."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from frontend.harmony.conversation import Conversation
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.served import ContextTooLong, ServedModel
from frontend.text.tokenizer import TooManyTokens
from frontend.turn.choice import Choice, Reader
from frontend.turn.raw_text import RawText
from frontend.turn.request import Client, RawPrompts, TurnRequest
from frontend.turn.thoughts import Encoded, Thoughts, encoded

# Prompt log probabilities travel in one worker message, and NATS limits those to 1 MB.
MAX_SCORED_TOKENS = 8192
# Longer prompts are rendered and tokenised in a thread, so that running streams do not stall.
LONG_BYTES = 8192


def fitted(request: TurnRequest, served: ServedModel, *, num_prompt_tokens: int) -> Sampling:
    """The request's sampling for a prompt of that length, with the model's stop tokens; `max_tokens` is
    capped by the rest of the context.

    Raises ContextTooLong if the prompt fills the context, InvalidRequest if the fields contradict each other
    or name unknown token ids.
    """
    _check_scored(request, num_prompt_tokens)
    sampling, tokenizer = request.sampling, served.tokenizer
    limit = min(sampling.max_tokens, _room(request, served, num_prompt_tokens))
    if sampling.min_tokens > limit:
        raise InvalidRequest(
            f"`min_tokens` is {sampling.min_tokens}, but the answer is limited to {limit} tokens.",
            param="min_tokens",
        )
    tokenizer.checked(list(sampling.logit_bias), served.name, "logit_bias")
    own = tokenizer.checked(list(sampling.stop_token_ids), served.name, "stop_token_ids")
    stops = tuple(dict.fromkeys((*tokenizer.stop_token_ids, *own)))
    return msgspec.structs.replace(sampling, max_tokens=limit, stop_token_ids=stops)


def _check_scored(request: TurnRequest, num_prompt_tokens: int) -> None:
    if request.sampling.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
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


async def prepare(
    request: TurnRequest,
    client: Client,
    served: ServedModel,
    thoughts: Thoughts,
    check_load: Callable[[str, str, float], None],
    *,
    max_choices: int,
) -> list[Choice]:
    """The choices, prompt by prompt, ready to be generated. Reasoning that the client did not send back with
    its calls is restored from `thoughts`, and new reasoning is kept there. Raises a BatonError for requests
    that cannot be served; `check_load` is `Generator.check`, before work is spent on the prompt."""
    _check_num_choices(request, max_choices)
    caller = client.caller(request.user)
    check_load(served.name, caller, client.deadline_s)
    prompts = await encode(request, client.owner, served, thoughts)
    sampling = fitted(request, served, num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts))
    requests = _token_requests(request, client, served.name, prompts, sampling)

    def keep(choice: Choice) -> None:
        is_whole = choice.finish_reason != "length" and not choice.repairs
        turn = choice.writing.turn(served.tokenizer) if is_whole else None
        if turn is not None:
            turn = msgspec.structs.replace(turn, current_date=prompts[0].current_date)
            thoughts.keep_turn(client.owner, choice.call_ids, turn)
        else:
            thoughts.keep(client.owner, choice.call_ids, choice.thought)

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
    request: TurnRequest, client: Client, model: str, prompts: Sequence[Encoded], sampling: Sampling
) -> list[GenerateRequest]:
    """One per choice of each prompt. If there are several, their ids are `<request_id>-<index>`, since
    workers need unique ones."""
    requests = [
        GenerateRequest(
            request_id=client.request_id,
            model=model,
            token_ids=prompt.token_ids,
            num_opening_tokens=prompt.num_opening_tokens,
            sampling=msgspec.structs.replace(sampling, choice=choice),
            deadline_s=client.deadline_s,
            priority=request.priority,
            cache_salt=client.cache_salt(request.cache_salt),
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
    cut_ids: Sequence[int] = request.sampling.stop_token_ids
    if isinstance(prompt, Conversation):
        offered = frozenset(tool.called for tool in prompt.tools)
        text_tools = frozenset(t.called for t in prompt.tools if t.takes_text and t.grammar is None)
        reader = HarmonyParser(served.tokenizer.vocabulary, offered, may_call=bool(prompt.tools))
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
