"""Turns tool choice, strict tools and output formats into constraints on the answer's Harmony messages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm, Sampling, Syntax
from frontend.harmony.conversation import AnswerFormat, TextGrammar, Tool
from frontend.turn.fields import GuidedFields, JsonSchema, NamedSchema, SamplingFields

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


_META = re.compile(r"[\\.+*?()|\[\]{}^$/-]")


def demanded_form(body: SamplingFields, response_format: AnswerFormat | None) -> AnswerFormat | None:
    """The format that the body demands. Raises InvalidRequest, naming the second, if it demands two."""
    forms = [] if response_format is None else [response_format]
    forms += _forms(body)
    if len(forms) > 1:
        raise InvalidRequest(
            f"`{forms[1].path}` cannot be combined with `{forms[0].path}`; send only one output format.",
            param=forms[1].path,
        )
    return forms[0] if forms else None


def _forms(body: SamplingFields) -> Iterator[AnswerFormat]:
    yield from _guided(body, "")
    if body.nvext is not None:
        yield from _guided(body.nvext, "nvext.")
    if body.regex is not None:
        yield _text_form("regex", body.regex, "regex")
    if body.ebnf is not None:
        yield _text_form("ebnf", body.ebnf, "ebnf")
    asked = body.structured_outputs
    if asked is not None:
        path = "structured_outputs."
        names = {"json": asked.json, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
        yield from (_form(kind, value, path + kind) for kind, value in names.items() if value is not None)
        if asked.json_object:
            yield any_object("structured_outputs.json_object")


def _guided(fields: GuidedFields, path: str) -> Iterator[AnswerFormat]:
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            yield _form(kind, value, f"{path}guided_{kind}")


def _form(kind: str, value: Any, path: str) -> AnswerFormat:
    match kind:
        case "json":
            return AnswerFormat(schema=_schema(value, path), path=path)
        case "regex":
            return _text_form("regex", value, path)
        case "choice":
            return _text_form("regex", "|".join(_META.sub(r"\\\g<0>", choice) for choice in value), path)
        case _:
            return _text_form("ebnf" if "::=" in value else "lark", value, path)


def _text_form(syntax: Syntax, text: str, path: str) -> AnswerFormat:
    return AnswerFormat(schema=None, grammar=TextGrammar(syntax=syntax, text=text, path=path), path=path)


def _schema(value: JsonSchema, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{path}` is not a valid JSON schema: {error}.", param=path) from None


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
    """`tool_choice`: whether a tool may or must be called, and which ones (None: all that are offered); those
    of a namespace go by their own name, too. `left_out` are the paths of the tools that cannot run here."""

    may_call: bool = True
    must_call: bool = False
    names: frozenset[str] | None = None
    left_out: tuple[str, ...] = ()


_ANY_OBJECT: dict[str, object] = {"type": "object"}


def any_object(path: str) -> AnswerFormat:
    """The format of any JSON object."""
    return AnswerFormat(schema=_ANY_OBJECT, path=path)


def by_schema(named: NamedSchema, path: str) -> AnswerFormat:
    """The format of a named schema, or of any JSON object if the schema is missing."""
    if named.schema is None:
        return AnswerFormat(schema=_ANY_OBJECT, strict=bool(named.strict), path=path)
    return AnswerFormat(
        schema=named.schema,
        name=named.name,
        description=named.description,
        strict=bool(named.strict),
        path=path,
    )


def guided(
    tools: Sequence[Tool], choice: CallChoice | None = None, answer: AnswerFormat | None = None
) -> Guided | None:
    """The constraint on the answer, or None if nothing is demanded. Reasoning is never constrained, but
    limited to one message where a call or an `answer` format is demanded.

    `tools` are those that the prompt shows. An `answer` format excludes a preamble, which would be visible
    text next to the JSON. Raises InvalidRequest, naming `tool_choice` or the schema's field, if the choice
    names tools that are not offered or the schemas exceed `MAX_SCHEMA_BYTES`.
    """
    choice = choice or CallChoice()
    callable_tools = _callable(tools, choice)
    if not (choice.must_call or choice.names is not None or answer or any(_is_held(tool) for tool in tools)):
        return None
    last = [_call(tool, is_enforced=choice.must_call or tool.strict) for tool in callable_tools]
    if not choice.must_call:
        last.append(_FINAL if answer is None else _final(answer))
    is_free = answer is None and not choice.must_call
    # Otherwise the model could evade the demand by reasoning without end.
    leading = (_ANALYSIS, _PREAMBLE) if is_free else (_ANALYSIS,)
    form = Guided(leading=leading, last=tuple(last), leads_once=not is_free)
    _check_size(form)
    return form


def raw_guided(answer: AnswerFormat | None) -> Guided | None:
    """The constraint on a raw completion. Raises as `guided` does."""
    if answer is None:
        return None
    form = Guided(last=(msgspec.structs.replace(_final(answer), headers=("",)),))
    _check_size(form)
    return form


def with_form(sampling: Sampling, form: Guided | None) -> Sampling:
    """`sampling` constrained to `form`. Raises InvalidRequest if `ignore_eos` contradicts it."""
    if form is not None and sampling.ignore_eos:
        raise InvalidRequest(
            "`ignore_eos` cannot be combined with an output format, strict tools or a required tool call.",
            param="ignore_eos",
        )
    return sampling if form is None else msgspec.structs.replace(sampling, guided=form)


def _callable(tools: Sequence[Tool], choice: CallChoice) -> list[Tool]:
    if choice.must_call and not tools:
        left_out = ", ".join(path.removeprefix("tools[].") for path in choice.left_out)
        what = f"{left_out} cannot run here, and there is no other tool" if left_out else "`tools` is empty"
        raise InvalidRequest(f"`tool_choice` requires a call, but {what}.", param="tool_choice")
    if choice.names is None:
        return list(tools)
    missing = choice.names - {tool.called for tool in tools}
    inner = [tool for tool in tools if tool.name in missing]
    missing -= {tool.name for tool in inner}
    if missing or not choice.names:
        what = f"{min(missing)!r}, which is not in `tools`" if missing else "no tool"
        raise InvalidRequest(f"`tool_choice` names {what}.", param="tool_choice")
    return [tool for tool in tools if tool.called in choice.names or tool in inner]


def _is_held(tool: Tool) -> bool:
    return tool.strict or tool.grammar is not None


def _call(tool: Tool, *, is_enforced: bool) -> MessageForm:
    form = MessageForm(headers=tuple(_call_headers(tool)), end="<|call|>")
    if tool.grammar is not None:
        return _held(form, tool.grammar)
    if not is_enforced or tool.takes_text:
        return form
    path = f"{tool.path}.parameters"
    return msgspec.structs.replace(
        form, grammar=_text(_arguments(tool), path, tool.strict), lenient=not tool.strict, param=path
    )


def _held(form: MessageForm, grammar: TextGrammar) -> MessageForm:
    return msgspec.structs.replace(form, grammar=grammar.text, syntax=grammar.syntax, param=grammar.path)


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
    if answer.grammar is not None:
        return _held(_FINAL, answer.grammar)
    return MessageForm(
        headers=(*_FINAL.headers, "<|channel|>final <|constrain|>json<|message|>"),
        end=_FINAL.end,
        grammar=_text(answer.schema, answer.path, answer.strict),
        lenient=not answer.strict,
        param=answer.path,
    )


def _text(schema: object, param: str, strict: bool) -> str:
    try:
        return msgspec.json.encode(closed(schema) if strict else schema).decode()
    except (RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(
            f"`{param}`: the schema cannot be encoded as JSON: {error}.", param=param
        ) from None


def _check_size(form: Guided) -> None:
    num_bytes = 0
    for message in form.last:
        num_bytes += len(message.grammar or "")
        if num_bytes > MAX_SCHEMA_BYTES:
            raise InvalidRequest(
                f"`{message.param}`: the schemas and grammars to enforce exceed {MAX_SCHEMA_BYTES} bytes.",
                param=message.param,
            )
