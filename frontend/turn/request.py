"""One request, independent of the API: its prompt, the form of its answer, then the requests to workers."""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr, replace

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, MessageForm, Sampling, Syntax
from frontend.harmony.conversation import AnswerFormat, Conversation, TextGrammar, Tool, render
from frontend.harmony.parse import HarmonyParser
from frontend.text.tokenizer import ModelTokenizer, ServedModel, TooManyTokens
from frontend.turn.choice import Choice, RawText
from frontend.turn.fields import ANY_OBJECT, CommonFields, JsonSchema, Nvext, first_given
from frontend.turn.ids import new_seed
from frontend.turn.thoughts import Kept, Thoughts

T = TypeVar("T")
_SEED_MASK = 2**63 - 1


class CallChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`: whether a tool must be called, and which ones may be (None: all that are offered); those
    of a namespace go by their own name, too. With `none` no tool is offered."""

    must_call: bool = False
    names: frozenset[str] | None = None


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt, which the field at `path` contains. Raw prompts
    are not rendered and their answers not parsed: texts, with control tokens spelled out, or token ids;
    `shows_special` spells out those of the answers, too. `num_bytes` is about the most that the text to
    render and tokenise may have. The answer ends where the context does, and before a string of `stop` or
    call number `max_calls` + 1. The constructor sets `form`, and raises as `demanded` does."""

    fields: CommonFields
    prompt: Conversation | tuple[str | list[int], ...]
    path: str
    num_bytes: int
    calls: CallChoice = CallChoice()
    shows_special: bool = False
    max_tokens: int | None = None
    num_choices: int | None = None
    stop: str | Sequence[str] | None = None
    max_calls: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    form: Guided | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "form", demanded(self))


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The client of one HTTP request: the request's id, its deadline, the owner of its API key, and the
    client's address. `key_name` is that of the key, empty if keys are not checked: stored responses belong to
    it, and so does cached KV, unless the key `shares_cache`."""

    request_id: str
    deadline_s: float
    owner: str = ""
    address: str = ""
    key_name: str = ""
    shares_cache: bool = False
    trace_headers: dict[str, str] | None = None

    def caller(self, user: str | None) -> str:
        """Whose requests take turns with others' at full workers: a key and, in a new line, a user; or an
        address."""
        return f"{self.owner}\n{(user or '')[:256]}" if self.owner or user else self.address


# Prompt log probabilities travel in one worker message, and NATS limits those to 1 MB.
MAX_SCORED_TOKENS = 8192
LONG_BYTES = 8192


async def in_time(num_bytes: int, work: Callable[[], T]) -> T:
    """Do work on a body of this length: in a thread if it is long, so that running streams do not stall."""
    return await asyncio.to_thread(work) if num_bytes > LONG_BYTES else work()


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens, and how many are before the first answer. `current_date` is the conversation's."""

    token_ids: list[int]
    num_opening_tokens: int = 0
    current_date: str | None = None


async def encode(request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts) -> list[Prompt]:
    """Each prompt of a request: in a thread if they are long. Raises InvalidRequest if one cannot be made,
    ContextTooLong if it is too long to be counted."""
    return await in_time(request.num_bytes, partial(_encoded, request, owner, served, thoughts))


def _encoded(request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts) -> list[Prompt]:
    prompt, tokenizer, limit = request.prompt, served.tokenizer, served.max_counted_tokens
    try:
        if isinstance(prompt, Conversation):
            conversation = thoughts.resumed(owner, prompt, served.current_date)
            ids, num_opening = tokenizer.encode_segments(render(conversation), limit)
            date = conversation.current_date
            return [Prompt(token_ids=ids, num_opening_tokens=num_opening, current_date=date)]
        return [
            Prompt(
                token_ids=tokenizer.encode_text(each, allow_special=True, limit=limit)
                if isinstance(each, str)
                else tokenizer.checked(each, served.name, request.path)
            )
            for each in prompt
        ]
    except TooManyTokens:
        raise served.too_long(request.path) from None


MAX_SCHEMA_BYTES = 128 << 10

_NEXT_MESSAGE = "<|end|><|start|>assistant"
_ANALYSIS = MessageForm(headers=("<|channel|>analysis<|message|>",), end=_NEXT_MESSAGE)
_PREAMBLE = MessageForm(headers=("<|channel|>commentary<|message|>",), end=_NEXT_MESSAGE)
_FINAL = MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>")
# The model writes calls in all these ways, half of them on `analysis`.
_CHANNELS = ("commentary", "analysis")
_CALL_TYPES = (" <|constrain|>json", " json", "")
_TEXT_TYPES = (" code", "")


def _schema(value: JsonSchema, path: str) -> AnswerFormat:
    try:
        schema = value if isinstance(value, dict) else msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest.at(path, f"is not a valid JSON schema: {error}.") from None
    return AnswerFormat(schema=schema, path=path)


def _grammar(syntax: Syntax, text: str, path: str) -> AnswerFormat:
    return AnswerFormat(schema=None, grammar=TextGrammar(syntax=syntax, text=text, path=path), path=path)


def _choices(choices: Sequence[str], path: str) -> AnswerFormat:
    return _grammar("regex", "|".join(_META.sub(r"\\\g<0>", choice) for choice in choices), path)


_META = re.compile(r"[\\.+*?()|\[\]{}^$/-]")
# What each field that demands a format contains.
_FORMATS: dict[str, Callable[[Any, str], AnswerFormat]] = {
    "json": _schema,
    "regex": partial(_grammar, "regex"),
    "choice": _choices,
    "grammar": lambda text, path: _grammar("ebnf" if "::=" in text else "lark", text, path),
}


def _demanded_format(fields: CommonFields, response_format: AnswerFormat | None) -> AnswerFormat | None:
    """The format that the body demands. Raises InvalidRequest, naming the second, if it demands two."""
    formats = [] if response_format is None else [response_format]
    guided, newer = "guided_", fields.structured_outputs
    holders = (("", guided, fields), ("nvext.", guided, fields.nvext), ("structured_outputs.", "", newer))
    formats += [
        read(value, path + prefix + name)
        for path, prefix, holder in holders
        if holder is not None
        for name, read in _FORMATS.items()
        if (value := getattr(holder, prefix + name)) is not None
    ]
    if len(formats) > 1:
        raise InvalidRequest.at(
            formats[1].path, f"cannot be combined with `{formats[0].path}`; send only one output format."
        )
    return formats[0] if formats else None


def demanded(request: TurnRequest) -> Guided | None:
    """The constraint that a request puts on its answers; None if nothing is demanded. Raises InvalidRequest
    for two formats, for `ignore_eos`, and as `guided` does."""
    prompt, fields = request.prompt, request.fields
    form = None
    if isinstance(prompt, Conversation):
        form = guided(prompt.tools, request.calls, _demanded_format(fields, prompt.answer_format))
    elif (answer := _demanded_format(fields, None)) is not None:
        form = _checked(Guided(last=(replace(_final(answer), headers=("",)),)))
    if form is not None and fields.ignores_eos:
        what = "cannot be combined with an output format, strict tools or a required tool call."
        raise InvalidRequest.at("ignore_eos", what)
    return form


def guided(
    tools: Sequence[Tool], choice: CallChoice | None = None, answer: AnswerFormat | None = None
) -> Guided | None:
    """The constraint on the answer, or None if nothing is demanded; `tools` are those that the prompt shows.
    Reasoning is not constrained, but limited to one message where a call or an `answer` format is demanded.
    A format excludes a preamble, which would be visible text next to the JSON. Raises InvalidRequest if the
    choice names tools that are not offered or the schemas exceed `MAX_SCHEMA_BYTES`."""
    choice = choice or CallChoice()
    callable_tools = _callable(tools, choice)
    is_held = any(tool.strict or tool.grammar is not None for tool in tools)
    if not (choice.must_call or choice.names is not None or answer or is_held):
        return None
    last = [_call(tool, is_enforced=choice.must_call or tool.strict) for tool in callable_tools]
    if not choice.must_call:
        last.append(_FINAL if answer is None else _final(answer))
    is_free = answer is None and not choice.must_call
    # Otherwise the model could evade the demand by reasoning without end.
    leading = (_ANALYSIS, _PREAMBLE) if is_free else (_ANALYSIS,)
    return _checked(Guided(leading=leading, last=tuple(last), leads_once=not is_free))


def _callable(tools: Sequence[Tool], choice: CallChoice) -> Sequence[Tool]:
    if choice.must_call and not tools:
        raise InvalidRequest.at("tool_choice", "requires a call, but `tools` has no tool that can run here.")
    if choice.names is None:
        return tools
    inner = choice.names - {tool.called for tool in tools}
    missing = inner - {tool.name for tool in tools}
    if missing or not choice.names:
        what = f"{min(missing)!r}, which is not in `tools` or cannot run here" if missing else "no tool"
        raise InvalidRequest.at("tool_choice", f"names {what}.")
    return [tool for tool in tools if tool.called in choice.names or tool.name in inner]


def _call(tool: Tool, *, is_enforced: bool) -> MessageForm:
    """The form of a call. Its arguments must be an object even if the schema does not say so."""
    recipient = f" to={tool.namespace}.{tool.name}"
    headers = [
        header
        for channel in _CHANNELS
        for content_type in (_TEXT_TYPES if tool.takes_text else _CALL_TYPES)
        for header in (
            f"<|channel|>{channel}{recipient}{content_type}<|message|>",
            f"{recipient}<|channel|>{channel}{content_type}<|message|>",
        )
    ]
    form = MessageForm(headers=tuple(headers), end="<|call|>")
    if tool.grammar is None and (tool.takes_text or not is_enforced):
        return form
    schema = tool.parameters
    if schema is None:
        schema = ANY_OBJECT | {"additionalProperties": False}
    elif isinstance(schema, dict):
        schema = ANY_OBJECT | schema
    return _constrained(form, tool.grammar, schema, f"{tool.path}.parameters", is_strict=tool.strict)


def _final(answer: AnswerFormat) -> MessageForm:
    json_headers = () if answer.grammar is not None else ("<|channel|>final <|constrain|>json<|message|>",)
    form = replace(_FINAL, headers=(*_FINAL.headers, *json_headers))
    return _constrained(form, answer.grammar, answer.schema, answer.path, is_strict=answer.strict)


def _constrained(
    form: MessageForm, grammar: TextGrammar | None, schema: object, path: str, *, is_strict: bool
) -> MessageForm:
    """The form of a message that follows the grammar, if there is one, else the schema at `path`."""
    if grammar is not None:
        return replace(form, grammar=grammar.text, syntax=grammar.syntax, param=grammar.path)
    try:
        text = msgspec.json.encode(schema).decode()
    except RecursionError as error:
        raise InvalidRequest.at(path, f"cannot be encoded as JSON: {error}.") from None
    return replace(form, grammar=text, lenient=not is_strict, param=path)


def _checked(form: Guided) -> Guided:
    num_bytes = 0
    for message in form.last:
        num_bytes += len(message.grammar or "")
        if num_bytes > MAX_SCHEMA_BYTES and message.param is not None:
            what = f"makes the schemas and grammars to enforce exceed {MAX_SCHEMA_BYTES} bytes."
            raise InvalidRequest.at(message.param, what)
    return form


def sampling_of(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> Sampling:
    """The request's sampling after a prompt of that length, with the model's stop tokens. Raises
    ContextTooLong, or InvalidRequest if fields contradict each other or name unknown token ids."""
    fields, nvext = request.fields, request.fields.nvext or Nvext()
    max_tokens = _max_tokens(request, served, num_prompt_tokens)
    # `top_p` 0 means greedy sampling, but engines reject the value 0.
    greedy = fields.top_p == 0 or nvext.greed_sampling
    check, name = served.tokenizer.checked, served.name
    logit_bias = {int(token_id): value for token_id, value in (fields.logit_bias or {}).items()}
    check(list(logit_bias), name, "logit_bias")
    own = check(fields.stop_token_ids or [], name, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        seed=new_seed() if fields.seed is None else fields.seed & _SEED_MASK,
        is_seeded=fields.seed is not None,
        temperature=0.0 if greedy else first_given(fields.temperature, default=1.0),
        top_p=fields.top_p or 1.0,
        top_k=max(0, first_given(nvext.top_k, fields.top_k, default=0)),
        min_p=fields.min_p or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=first_given(nvext.repetition_penalty, fields.repetition_penalty, default=1.0),
        logit_bias=logit_bias,
        stop_token_ids=tuple(dict.fromkeys((*served.tokenizer.stop_token_ids, *own))),
        ignore_eos=fields.ignores_eos,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )


def _max_tokens(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> int:
    path, least = request.path, request.fields.min_tokens or 0
    if request.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        what = f"log probabilities are limited to prompts of {MAX_SCORED_TOKENS} tokens."
        raise InvalidRequest.at(path, f"has {num_prompt_tokens} tokens; {what}")
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise served.too_long(path, num_prompt_tokens)
    limit = min(request.max_tokens or room, room)
    if least > limit:
        raise InvalidRequest.at("min_tokens", f"is {least}, but the answer is limited to {limit} tokens.")
    return limit


_counting = asyncio.Lock()
"""Held for a prompt that is tokenised although the workers may be full: one at a time."""


async def _prompts(
    request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts, check: Callable[[], None]
) -> tuple[list[Prompt], int]:
    """The prompts, and how many tokens an answer may have. A client whose prompt is too long should not try
    again, so `check` comes after the tokens of one that may be."""
    counts_first = request.num_bytes > served.context_length and not _counting.locked()
    if not counts_first:
        check()
    async with _counting if counts_first else nullcontext():
        prompts = await encode(request, owner, served, thoughts)
    max_tokens = _max_tokens(request, served, max(len(prompt.token_ids) for prompt in prompts))
    if counts_first:
        check()
    return prompts, max_tokens


async def prepare(
    request: TurnRequest,
    client: Client,
    served: ServedModel,
    thoughts: Thoughts,
    check_load: Callable[[str, str, float], None],
    *,
    max_choices: int,
) -> list[Choice]:
    """The choices, prompt by prompt, ready to be generated; `thoughts` keeps their answers. Raises a
    BatonError for requests that cannot be served. For `check_load` (`Generator.check`) see `_prompts`."""
    fields, num = request.fields, request.num_choices or 1
    total = num * (1 if isinstance(request.prompt, Conversation) else len(request.prompt))
    if total > max_choices:
        raise InvalidRequest.at("n", f"makes {total} choices; at most {max_choices} are allowed.")
    caller = client.caller(fields.safety_identifier or fields.user)
    sampling = sampling_of(request, served, 0)
    check = partial(check_load, served.name, caller, client.deadline_s)
    prompts, max_tokens = await _prompts(request, client.owner, served, thoughts, check)
    keep = partial(_keep, thoughts, client.owner, prompts[0].current_date)
    # No key learns what another's prompts have in common with its own. Names of keys have no slash.
    is_own = client.key_name and not client.shares_cache
    salt = f"{client.key_name}/{fields.cache_salt or ''}" if is_own else fields.cache_salt or ""
    requests = [
        GenerateRequest(
            # Workers need unique ids.
            request_id=client.request_id if total == 1 else f"{client.request_id}-{i}",
            model=served.name,
            token_ids=prompts[i // num].token_ids,
            num_opening_tokens=prompts[i // num].num_opening_tokens,
            sampling=replace(sampling, choice=i % num, guided=request.form, max_tokens=max_tokens),
            deadline_s=client.deadline_s,
            priority=fields.priority or 0,
            cache_salt=salt,
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
    prompt, stop = request.prompt, request.stop or ()
    stops = (stop,) if isinstance(stop, str) else stop
    choice = partial(Choice, token_request, stop_strings=stops, caller=caller, on_finish=on_finish)
    if not isinstance(prompt, Conversation):  # any stop token is left out of the text
        reader = RawText(tokenizer, shows_special=request.shows_special)
        return choice(reader, tokenizer, cut_ids=token_request.sampling.stop_token_ids)
    offered = frozenset(tool.called for tool in prompt.tools)
    parser = HarmonyParser(tokenizer.vocabulary, offered, may_call=bool(offered))
    # The parser consumes the model's own stop tokens.
    cut_ids = request.fields.stop_token_ids or ()
    return choice(parser, tokenizer, max_calls=request.max_calls, cut_ids=cut_ids, tools=prompt.tools)


def _keep(thoughts: Thoughts, owner: str, current_date: str | None, choice: Choice) -> None:
    if choice.call_ids:
        thoughts.keep(Kept(owner, choice.call_ids[0], choice.written(), current_date))
