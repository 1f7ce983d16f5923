"""The API-neutral request: the prompt, the sampling, and the form that tool choice, strict tools and output
formats demand of the answer. A `path` names a field of the body."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm, Sampling, Syntax
from frontend.harmony.conversation import AnswerFormat, Conversation, TextGrammar, Tool
from frontend.turn.fields import (
    TEXT_TYPES,
    CommonFields,
    JsonObjectFormat,
    JsonSchema,
    NamedSchema,
    Nvext,
    Part,
    TextFormat,
    first_given,
    required,
)
from frontend.turn.ids import new_seed

# Keywords that hold subschemas by name, in a list, or singly. `allOf` is left out: members closed
# individually would reject each other's properties.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_LIST = frozenset({"anyOf", "oneOf", "prefixItems"})
_ONE = frozenset({"items", "additionalProperties"})
_OPEN = frozenset({"allOf", "additionalProperties", "unevaluatedProperties", "patternProperties"})


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` added to every object that lists its properties and does
    not already say how to treat others. Raises RecursionError for schemas nested too deeply."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _closed_inside(key, value) for key, value in schema.items()}
    if "properties" in made and not _OPEN & made.keys():
        made["additionalProperties"] = False
    return made


def _closed_inside(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: closed(inner) for name, inner in value.items()}
    if key in _IN_LIST and isinstance(value, list):
        return [closed(inner) for inner in value]
    return closed(value) if key in _ONE else value


def any_object(path: str) -> AnswerFormat:
    """The format of any JSON object."""
    return AnswerFormat(schema={"type": "object"}, path=path)


def _schema(value: JsonSchema, path: str) -> AnswerFormat:
    if isinstance(value, dict):
        return AnswerFormat(schema=value, path=path)
    try:
        return AnswerFormat(schema=msgspec.json.decode(value, type=dict[str, Any]), path=path)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{path}` is not a valid JSON schema: {error}.", param=path) from None


def _grammar(syntax: Syntax, text: str, path: str) -> AnswerFormat:
    return AnswerFormat(schema=None, grammar=TextGrammar(syntax=syntax, text=text, path=path), path=path)


_META = re.compile(r"[\\.+*?()|\[\]{}^$/-]")
# What each field that demands a format contains.
_NAMED_FORMATS: dict[str, Callable[[Any, str], AnswerFormat]] = {
    "json": _schema,
    "json_object": lambda _, path: any_object(path),
    "regex": partial(_grammar, "regex"),
    "ebnf": partial(_grammar, "ebnf"),
    "grammar": lambda text, path: _grammar("ebnf" if "::=" in text else "lark", text, path),
    "choice": lambda choices, path: _grammar("regex", "|".join(map(_literal, choices)), path),
}
# Under vLLM's older names, too.
_FORMATS = _NAMED_FORMATS | {f"guided_{name}": value for name, value in _NAMED_FORMATS.items()}


def _literal(choice: str) -> str:
    return _META.sub(r"\\\g<0>", choice)


def demanded_format(fields: CommonFields, response_format: AnswerFormat | None = None) -> AnswerFormat | None:
    """The format that the body demands. Raises InvalidRequest, naming the second, if it demands two."""
    formats = [] if response_format is None else [response_format]
    holders = {"": fields, "nvext.": fields.nvext, "structured_outputs.": fields.structured_outputs}
    formats += [
        _FORMATS[name](value, prefix + name)
        for prefix, holder in holders.items()
        for name in (holder.__struct_fields__ if holder is not None else ())
        if name in _FORMATS and (value := getattr(holder, name)) is not None and value is not False
    ]
    if len(formats) > 1:
        raise InvalidRequest(
            f"`{formats[1].path}` cannot be combined with `{formats[0].path}`; send only one output format.",
            param=formats[1].path,
        )
    return formats[0] if formats else None


MAX_SCHEMA_BYTES = 128 << 10

_NEXT_MESSAGE = "<|end|><|start|>assistant"
_ANALYSIS = MessageForm(headers=("<|channel|>analysis<|message|>",), end=_NEXT_MESSAGE)
_PREAMBLE = MessageForm(headers=("<|channel|>commentary<|message|>",), end=_NEXT_MESSAGE)
_FINAL = MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>")
# The model writes calls in all these ways, half of them on `analysis`.
_CHANNELS = ("commentary", "analysis")
_CALL_TYPES = (" <|constrain|>json", " json", "")
_TEXT_TYPES = (" code", "")


class CallChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`: whether a tool must be called, and which ones may be (None: all that are offered); those
    of a namespace go by their own name, too. With `none` no tool is offered."""

    must_call: bool = False
    names: frozenset[str] | None = None


def answer_format(
    given: TextFormat | JsonObjectFormat | NamedSchema | None, path: str
) -> AnswerFormat | None:
    """The format that the field at `path` demands; without a schema, any JSON object."""
    match given:
        case None | TextFormat():
            return None
        case NamedSchema(schema=None):
            return AnswerFormat(schema={"type": "object"}, strict=bool(given.strict), path=f"{path}.schema")
        case NamedSchema():
            return AnswerFormat(
                schema=given.schema,
                name=given.name,
                description=given.description,
                strict=bool(given.strict),
                path=f"{path}.schema",
            )
        case _:
            return any_object(path)


def guided(
    tools: Sequence[Tool], choice: CallChoice | None = None, answer: AnswerFormat | None = None
) -> Guided | None:
    """The constraint on the answer, or None if nothing is demanded. Reasoning is never constrained, but
    limited to one message where a call or an `answer` format is demanded.

    `tools` are those that the prompt shows. An `answer` format excludes a preamble, which would be visible
    text next to the JSON. Raises InvalidRequest, naming `tool_choice` or the schema's field, if the choice
    names tools that are not offered or the schemas exceed `MAX_SCHEMA_BYTES`."""
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


def raw_guided(answer: AnswerFormat | None) -> Guided | None:
    """The constraint on a raw completion. Raises as `guided` does."""
    if answer is None:
        return None
    return _checked(Guided(last=(replace(_final(answer), headers=("",)),)))


def _callable(tools: Sequence[Tool], choice: CallChoice) -> list[Tool]:
    if choice.must_call and not tools:
        raise InvalidRequest(
            "`tool_choice` requires a call, but `tools` has no tool that can run here.", param="tool_choice"
        )
    if choice.names is None:
        return list(tools)
    missing = choice.names - {tool.called for tool in tools}
    inner = [tool for tool in tools if tool.name in missing]
    missing -= {tool.name for tool in inner}
    if missing or not choice.names:
        what = f"{min(missing)!r}, which is not in `tools` or cannot run here" if missing else "no tool"
        raise InvalidRequest(f"`tool_choice` names {what}.", param="tool_choice")
    return [tool for tool in tools if tool.called in choice.names or tool in inner]


def _call(tool: Tool, *, is_enforced: bool) -> MessageForm:
    form = MessageForm(headers=tuple(_call_headers(tool)), end="<|call|>")
    if tool.grammar is None and (tool.takes_text or not is_enforced):
        return form
    path = f"{tool.path}.parameters"
    return _constrained(form, tool.grammar, _arguments(tool), path, is_strict=tool.strict)


def _call_headers(tool: Tool) -> Iterator[str]:
    recipient = f" to={tool.namespace}.{tool.name}"
    for channel in _CHANNELS:
        for content_type in _TEXT_TYPES if tool.takes_text else _CALL_TYPES:
            yield f"<|channel|>{channel}{recipient}{content_type}<|message|>"
            yield f"{recipient}<|channel|>{channel}{content_type}<|message|>"


def _arguments(tool: Tool) -> object:
    """The schema of the arguments, which must be an object even if the schema does not say so."""
    if tool.parameters is None:
        return {"type": "object", "additionalProperties": False}
    return {"type": "object", **tool.parameters} if isinstance(tool.parameters, dict) else tool.parameters


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
        text = msgspec.json.encode(closed(schema) if is_strict else schema).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"`{path}`: the schema cannot be encoded as JSON: {error}.", param=path
        ) from None
    return replace(form, grammar=text, lenient=not is_strict, param=path)


def _checked(form: Guided) -> Guided:
    num_bytes = 0
    for message in form.last:
        num_bytes += len(message.grammar or "")
        if num_bytes > MAX_SCHEMA_BYTES:
            raise InvalidRequest(
                f"`{message.param}`: the schemas and grammars to enforce exceed {MAX_SCHEMA_BYTES} bytes.",
                param=message.param,
            )
    return form


TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
REST_OF_CONTEXT = 2**31 - 1
"""`max_tokens` of an answer that may fill the context."""
_SEED_MASK = 2**63 - 1


def left_out(kind: str) -> str:
    """What the prompt says instead of content of this kind, such as an image."""
    return f"[{kind[:40]} left out: this model reads text only]"


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that an API defines and the client runs, such as `shell`: a function for the model. `properties`
    are the schemas of its arguments, which are enforced."""

    description: str
    properties: Mapping[str, object]
    required: Sequence[str]

    def function(self, name: str, path: str) -> Tool:
        parameters = {"type": "object", "properties": self.properties, "required": self.required}
        return Tool(name=name, description=self.description, parameters=parameters, strict=True, path=path)


def text_of_part(part: Part, path: str) -> str | None:
    """The text of a content part, None if it has none. Raises InvalidRequest if its field is missing."""
    if part.type not in TEXT_TYPES:
        return None
    if part.type == "refusal":
        return required(part.refusal, f"{path}.refusal")
    return required(part.text, f"{path}.text")


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and whose answers are not parsed: text, with control tokens spelled out,
    or token ids. `shows_special` spells out control tokens in the answers, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt.

    `num_bytes` is the approximate size of the text to render and tokenise. `sampling` has the client's stop
    tokens only, and a limit that the context may lower. `stop_strings` end the visible text and are not part
    of it; the answer ends before call number `max_calls` + 1. `user` is the client's, if it names one."""

    model: str
    prompt: Conversation | RawPrompts
    path: str
    num_bytes: int
    sampling: Sampling
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    max_calls: int | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def of(
        cls,
        fields: CommonFields,
        prompt: Conversation | RawPrompts,
        choice: CallChoice | None = None,
        *,
        path: str,
        num_bytes: int,
        max_tokens: int | None = None,
        num_choices: int | None = None,
        stop: str | list[str] | None = None,
        max_calls: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> "TurnRequest":
        """The request of a body of `num_bytes` whose prompt is at `path`. Raises InvalidRequest for fields
        that contradict each other, and as `guided` does."""
        if isinstance(prompt, RawPrompts):
            form = raw_guided(demanded_format(fields))
        else:
            form = guided(prompt.tools, choice, demanded_format(fields, prompt.answer_format))
        sampling = _sampling(fields, form, max_tokens or REST_OF_CONTEXT)
        return cls(
            model=fields.model,
            prompt=prompt,
            path=path,
            num_bytes=num_bytes,
            sampling=replace(sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            num_choices=num_choices or 1,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            max_calls=max_calls,
            user=fields.safety_identifier or fields.user,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
        )


def _sampling(fields: CommonFields, form: Guided | None, max_tokens: int) -> Sampling:
    nvext = fields.nvext or Nvext()
    # `top_p` 0 means greedy sampling, but engines reject the value 0.
    greedy = fields.top_p == 0 or nvext.greed_sampling
    ignore_eos = first_given(nvext.ignore_eos, fields.ignore_eos, default=False)
    if form is not None and ignore_eos:
        raise InvalidRequest(
            "`ignore_eos` cannot be combined with an output format, strict tools or a required tool call.",
            param="ignore_eos",
        )
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
        logit_bias={int(name): value for name, value in (fields.logit_bias or {}).items()},
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=ignore_eos,
        guided=form,
    )


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

    def cache_salt(self, given: str) -> str:
        """The client's salt, with its key's name: no key learns what another's prompts have in common with
        its own. Names of keys have no slash."""
        return f"{self.key_name}/{given}" if self.key_name and not self.shares_cache else given

    def caller(self, user: str | None) -> str:
        """Whose requests take turns with others' at full workers: a key and a user, or an address."""
        return f"{self.owner} {user or ''}" if self.owner or user else self.address
