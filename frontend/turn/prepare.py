"""Prepares a request for generation: renders and tokenises the prompt, resolves sampling and constraints."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from frontend.harmony.conversation import Conversation
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.tokenizer import (
    ContextTooLong,
    ModelTokenizer,
    Segment,
    ServedModel,
    SpecialToken,
    TooManyTokens,
)
from frontend.turn.choice import Choice, RawText
from frontend.turn.request import Client, RawPrompts, TurnRequest
from frontend.turn.thoughts import Thoughts

# Prompt log probabilities travel in one worker message, and NATS limits those to 1 MB.
MAX_SCORED_TOKENS = 8192
# Longer prompts are rendered and tokenised in a thread, so that running streams do not stall.
LONG_BYTES = 8192


def fitted(request: TurnRequest, served: ServedModel, *, num_prompt_tokens: int) -> Sampling:
    """The request's sampling for a prompt of that length, with the model's stop tokens; `max_tokens` is
    capped by the rest of the context.

    Raises ContextTooLong if the prompt fills the context, InvalidRequest if the fields contradict each other
    or name unknown token ids."""
    sampling, tokenizer, path = request.sampling, served.tokenizer, request.path
    if sampling.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"`{path}` has {num_prompt_tokens} tokens; log probabilities are limited to prompts of "
            f"{MAX_SCORED_TOKENS} tokens.",
            param=path,
        )
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {served.context_length} tokens, but `{path}` "
            f"has {num_prompt_tokens} tokens. Shorten it to leave room for the answer.",
            param=path,
        )
    limit = min(sampling.max_tokens, room)
    if sampling.min_tokens > limit:
        raise InvalidRequest(
            f"`min_tokens` is {sampling.min_tokens}, but the answer is limited to {limit} tokens.",
            param="min_tokens",
        )
    tokenizer.checked(list(sampling.logit_bias), served.name, "logit_bias")
    own = tokenizer.checked(list(sampling.stop_token_ids), served.name, "stop_token_ids")
    stops = tuple(dict.fromkeys((*tokenizer.stop_token_ids, *own)))
    return msgspec.structs.replace(sampling, max_tokens=limit, stop_token_ids=stops)


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens, and how many are before the first answer. `current_date` is the conversation's."""

    token_ids: list[int]
    num_opening_tokens: int = 0
    current_date: str | None = None


def encoded(segments: Iterable[Segment], tokenizer: ModelTokenizer, limit: int) -> Encoded:
    """The tokens of a rendered prompt. Raises TooManyTokens if there are more than `limit`."""
    token_ids: list[int] = []
    special_ids = tokenizer.special_ids
    start = num_opening = 0
    is_author = False
    for segment in segments:
        match segment:
            case SpecialToken():
                is_author = segment is SpecialToken.START
                if is_author:
                    start = len(token_ids)
                token_ids.append(special_ids[segment])
                continue
            case str():
                is_answer = is_author and segment.startswith("assistant")
                token_ids += tokenizer.encode_text_segment(segment, limit)
            case _:  # only answers are rendered as tokens
                is_answer = True
                if segment[0] == special_ids[SpecialToken.START]:
                    start = len(token_ids)
                token_ids += segment
        is_author = False
        if is_answer and not num_opening:
            num_opening = start
        if len(token_ids) > limit:
            raise TooManyTokens
    return Encoded(token_ids=token_ids, num_opening_tokens=num_opening)


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
    num = request.num_choices
    total = num * (len(request.prompt.prompts) if isinstance(request.prompt, RawPrompts) else 1)
    if total > max_choices:
        raise InvalidRequest(f"`n` makes {total} choices; at most {max_choices} are allowed.", param="n")
    caller = client.caller(request.user)
    check_load(served.name, caller, client.deadline_s)
    prompts = await encode(request, client.owner, served, thoughts)
    sampling = fitted(request, served, num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts))
    keep = partial(_keep, thoughts, client.owner, prompts[0].current_date, served.tokenizer)
    requests = [
        GenerateRequest(
            # Workers need unique ids.
            request_id=client.request_id if total == 1 else f"{client.request_id}-{i}",
            model=served.name,
            token_ids=prompts[i // num].token_ids,
            num_opening_tokens=prompts[i // num].num_opening_tokens,
            sampling=msgspec.structs.replace(sampling, choice=i % num),
            deadline_s=client.deadline_s,
            priority=request.priority,
            cache_salt=client.cache_salt(request.cache_salt),
            trace_headers=client.trace_headers,
        )
        for i in range(total)
    ]
    return [_choice(each, request, served.tokenizer, caller=caller, on_finish=keep) for each in requests]


def _choice(
    token_request: GenerateRequest,
    request: TurnRequest,
    tokenizer: ModelTokenizer,
    *,
    caller: str,
    on_finish: Callable[[Choice], None],
) -> Choice:
    prompt, stop_strings = request.prompt, request.stop_strings
    choice = partial(Choice, token_request, stop_strings=stop_strings, caller=caller, on_finish=on_finish)
    if isinstance(prompt, RawPrompts):  # any stop token is left out of the text
        reader = RawText(tokenizer, shows_special=prompt.shows_special)
        return choice(reader, cut_ids=token_request.sampling.stop_token_ids)
    text_tools = frozenset(tool.called for tool in prompt.tools if tool.takes_text and tool.grammar is None)
    offered = frozenset(tool.called for tool in prompt.tools)
    parser = HarmonyParser(tokenizer.vocabulary, offered, may_call=bool(prompt.tools))
    # The parser consumes the model's own stop tokens.
    cut_ids = request.sampling.stop_token_ids
    return choice(parser, max_calls=request.max_calls, cut_ids=cut_ids, text_tools=text_tools)


def _keep(
    thoughts: Thoughts, owner: str, current_date: str | None, tokenizer: ModelTokenizer, choice: Choice
) -> None:
    turn = choice.written(tokenizer)
    if turn is not None:
        thoughts.keep_turn(owner, choice.call_ids, msgspec.structs.replace(turn, current_date=current_date))
    else:
        thoughts.keep(owner, choice.call_ids, choice.thought)


async def encode(request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts) -> list[Encoded]:
    """The tokens of each prompt of a request, as `encode_prompt` makes them, in a thread if they are many."""
    encode_now = partial(encode_prompt, request.prompt, request.path, owner, served, thoughts)
    return await asyncio.to_thread(encode_now) if request.num_bytes > LONG_BYTES else encode_now()


def encode_prompt(
    prompt: Conversation | RawPrompts, path: str, owner: str, served: ServedModel, thoughts: Thoughts
) -> list[Encoded]:
    """The tokens of a conversation, or of each raw prompt, in the field `path`. Raises InvalidRequest if it
    cannot be rendered, ContextTooLong if it is too long to be counted."""
    limit = served.max_counted_tokens
    try:
        if isinstance(prompt, Conversation):
            conversation = thoughts.resumed(owner, prompt, served.current_date)
            made = encoded(render(conversation), served.tokenizer, limit)
            return [msgspec.structs.replace(made, current_date=conversation.current_date)]
        return [
            Encoded(
                token_ids=served.tokenizer.encode_text(each, allow_special=True, limit=limit)
                if isinstance(each, str)
                else served.tokenizer.checked(each, served.name, path)
            )
            for each in prompt.prompts
        ]
    except TooManyTokens:
        raise served.too_long(path) from None
