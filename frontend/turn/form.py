"""The form that tool choice, strict tools and output formats demand of an answer."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm, Syntax
from frontend.harmony.conversation import AnswerFormat, Conversation, TextGrammar, Tool
from frontend.turn.fields import (
    CommonFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedSchema,
    TextFormat,
)

_ANY_OBJECT = {"type": "object"}


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


def answer_format(
    given: TextFormat | JsonObjectFormat | JsonSchemaFormat | NamedSchema | None, path: str
) -> AnswerFormat | None:
    """The format that the field at `path` demands; without a schema, any JSON object."""
    match given:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return AnswerFormat(schema=_ANY_OBJECT, path=path)
        case JsonSchemaFormat(json_schema=named):
            return answer_format(named, f"{path}.json_schema")
        case NamedSchema(schema=schema):
            return AnswerFormat(
                schema=_ANY_OBJECT if schema is None else schema,
                name=None if schema is None else given.name,
                description=given.description,
                strict=bool(given.strict),
                path=f"{path}.schema",
            )


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


def demanded(
    fields: CommonFields, conversation: Conversation | None = None, choice: CallChoice | None = None
) -> Guided | None:
    """The constraint that a body puts on the answer to its conversation, else on a raw completion; None if
    nothing is demanded. Raises InvalidRequest for two formats, for `ignore_eos`, and as `guided` does."""
    answer = _demanded_format(fields, None if conversation is None else conversation.answer_format)
    form = None
    if conversation is not None:
        form = guided(conversation.tools, choice, answer)
    elif answer is not None:
        form = _checked(Guided(last=(replace(_final(answer), headers=("",)),)))
    if form is not None and fields.ignores_eos:
        raise InvalidRequest.at(
            "ignore_eos", "cannot be combined with an output format, strict tools or a required tool call."
        )
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
        schema = _ANY_OBJECT | {"additionalProperties": False}
    elif isinstance(schema, dict):
        schema = _ANY_OBJECT | schema
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
    except (RecursionError, UnicodeEncodeError) as error:
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
