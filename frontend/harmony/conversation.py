"""A Harmony conversation, independent of the API, and its rendering as segments, ready to be tokenised.

Schemas become TypeScript, byte for byte as openai-harmony renders them. That includes its quirks, since the
model was trained with them: `anyOf` and `$ref` are `any`, the second line of a property's description is not
commented out, enum values are quoted but not escaped, an object's description appears twice."""

import re
from array import array
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Syntax
from frontend.text.tokenizer import Segment, SpecialToken

FUNCTIONS = "functions"
# Tools that gpt-oss was trained with and may call although they are not offered.
BUILTIN_TOOLS = ("browser", "python")
ReasoningEffort = Literal["low", "medium", "high"]


def called_name(namespace: str, name: str) -> str:
    """The tool name in the parser's deltas."""
    return name if namespace == FUNCTIONS else f"{namespace}.{name}"


def is_builtin(name: str) -> bool:
    """Whether a call's name belongs to a built-in tool: `browser.search`, `python`."""
    return name.partition(".")[0] in BUILTIN_TOOLS


class TextGrammar(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar that a text must match; `path` is the field that contains it."""

    syntax: Syntax
    text: str
    path: str


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call; `parameters` is its JSON schema, parsed (None: no arguments). `strict`
    enforces the schema in every call. With `takes_text`, the arguments are text that follows the `grammar`,
    if any. `path` is the field that defines the tool."""

    name: str
    description: str | None = None
    parameters: object = None
    strict: bool = False
    takes_text: bool = False
    grammar: TextGrammar | None = None
    namespace: str = FUNCTIONS
    path: str = "tools"

    @property
    def called(self) -> str:
        """The tool name in the parser's deltas, without the namespace `functions`."""
        return called_name(self.namespace, self.name)


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A group of tools other than `functions`."""

    name: str
    description: str | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call in the history; `arguments` is text as the model wrote it, valid JSON or not."""

    call_id: str
    name: str
    arguments: str
    takes_text: bool = False
    namespace: str = FUNCTIONS

    @property
    def called(self) -> str:
        return called_name(self.namespace, self.name)


class Instructions(msgspec.Struct, frozen=True, tag="instructions"):
    """A system or developer message of the API, rendered as Harmony's developer message."""

    text: str


class UserTurn(msgspec.Struct, frozen=True, tag="user"):
    """A user message."""

    text: str


Kind = Literal["thought", "text", "call"]


class WrittenMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as the model wrote it: the tokens after `<|start|>assistant` for the first one of an answer,
    else from `<|start|>` on; `text` is its body, `call` its recipient."""

    kind: Kind
    text: str
    token_ids: array  # type: ignore[type-arg]  # it takes none when it runs, where msgspec reads it
    call: str = ""


class AssistantTurn(msgspec.Struct, frozen=True, kw_only=True, tag="assistant"):
    """One earlier answer: reasoning, visible text (a preamble if calls follow), calls. `is_preamble`: it
    ended after its preamble. `parts` are what it was joined from, in order. `written` are its messages as the
    model wrote them, if known."""

    reasoning: str | None = None
    text: str | None = None
    is_preamble: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
    parts: tuple["AssistantTurn", ...] = ()
    written: tuple[WrittenMessage, ...] = ()

    @property
    def is_final(self) -> bool:
        """Whether the text is a final answer: no later prompt shows the reasoning before it."""
        return bool(self.text) and not (self.tool_calls or self.is_preamble)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """The result of a tool call; `path` is the field that contains the call's id."""

    call_id: str
    text: str
    path: str = "tool_call_id"


Turn = Instructions | UserTurn | AssistantTurn | ToolResult


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the visible answer: text that follows `grammar`, else JSON that follows `schema`. Without
    `strict`, keywords that cannot be enforced are ignored. The prompt shows a schema that has a `name`.
    `path` is the field that demands the format."""

    schema: object
    grammar: TextGrammar | None = None
    name: str | None = None
    description: str | None = None
    strict: bool = False
    path: str = "response_format"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """The complete input of the prompt. `current_date` is `YYYY-MM-DD`, or None to omit it."""

    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    namespaces: tuple[Namespace, ...] = ()
    reasoning_effort: ReasoningEffort = "medium"
    current_date: str | None = None
    answer_format: AnswerFormat | None = None


# Names are single header words: whitespace would end them, `<` would look like a control token.
_UNFIT = re.compile(r"[\s<>|=]")
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
# As the model writes it; a plain ` json` is a bug of the Hugging Face template (openai/harmony issue 91).
_JSON = (" ", SpecialToken.CONSTRAIN, "json")
_FUNCTIONS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."


def render(conversation: Conversation) -> list[Segment]:
    """The whole prompt, up to and including `<|start|>assistant`.

    Leading instructions are joined by blank lines in the developer message that also has tools and response
    format; later ones keep their place. Reasoning is kept only after the last final answer, where a chain of
    tool calls is still running. The text of a message is one segment, so that earlier turns stay identical
    between requests and their tokens can be cached.

    Raises InvalidRequest, naming the field, for invalid tool names, schemas nested too deeply, and tool
    results without a matching call."""
    turns = conversation.turns
    leading = []
    for turn in turns:
        if not isinstance(turn, Instructions):
            break
        leading.append(turn.text)

    date = "" if conversation.current_date is None else f"\nCurrent date: {conversation.current_date}"
    has_functions = any(tool.namespace == FUNCTIONS for tool in conversation.tools)
    channels = f"{_CHANNELS}\n{_FUNCTIONS_CHANNEL}" if has_functions else _CHANNELS
    system = f"{_IDENTITY}{date}\n\nReasoning: {conversation.reasoning_effort}\n\n{channels}"
    segments = _message("system", system)
    if developer := _developer_text(conversation, "\n\n".join(filter(None, leading))):
        segments += _message("developer", developer)
    segments += _history(turns[len(leading) :])
    return [*segments, SpecialToken.START, "assistant"]


def _history(turns: tuple[Turn, ...]) -> list[Segment]:
    finals = (isinstance(turn, AssistantTurn) and turn.is_final for turn in turns)
    last_final = max((i for i, is_final in enumerate(finals) if is_final), default=-1)
    called: dict[str, str] = {}
    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        match turn:
            case Instructions(text=text):
                segments += _message("developer", f"# Instructions\n\n{text}")
            case UserTurn(text=text):
                segments += _message("user", text)
            case AssistantTurn():
                written = [message.call for message in turn.written if message.kind == "call"]
                recipients = written or map(_recipient, turn.tool_calls)
                called |= zip([call.call_id for call in turn.tool_calls], recipients, strict=True)
                segments += _assistant(turn, keeps_reasoning=i > last_final)
            case ToolResult():
                recipient = called.get(turn.call_id)
                if recipient is None:
                    raise InvalidRequest.at(
                        turn.path, f"is {turn.call_id!r}; no earlier tool call has this id."
                    )
                channel = "analysis" if is_builtin(recipient) else "commentary"
                segments += _message(f"{recipient} to=assistant", turn.text, channel=channel)
    return segments


def _assistant(turn: AssistantTurn, *, keeps_reasoning: bool) -> Iterator[Segment]:
    for i, message in enumerate(turn.written):
        if message.kind == "thought" and not keeps_reasoning:
            continue
        if not i:
            yield SpecialToken.START
            yield "assistant"
        yield message.token_ids
    if turn.written:
        return
    for part in (turn,) if turn.is_final else turn.parts or (turn,):
        if part.reasoning and keeps_reasoning:
            yield from _message("assistant", part.reasoning, channel="analysis")
        # Clients send whitespace with calls that the model wrote without text.
        if part.text and (turn.is_final or not part.text.isspace()):
            channel = "final" if turn.is_final else "commentary"
            yield from _message("assistant", part.text, channel=channel)
        for call in part.tool_calls:
            recipient = _recipient(call)
            is_function = not is_builtin(recipient)
            yield from _message(
                f"assistant to={recipient}",
                call.arguments,
                channel="commentary" if is_function else "analysis",
                content_type=_JSON if is_function and not call.takes_text else (" code",),
                end=SpecialToken.CALL,
            )


def _recipient(call: ToolCall) -> str:
    """The recipient of a call. The model may have made up its name, so an invalid one is sanitised."""
    name = _UNFIT.sub("_", call.name.removeprefix("functions.")) or "_"
    return f"{_UNFIT.sub('_', call.namespace)}.{name}"


def _message(
    author: str,
    text: str,
    *,
    channel: str | None = None,
    content_type: tuple[Segment, ...] = (),
    end: SpecialToken = SpecialToken.END,
) -> list[Segment]:
    marked = (SpecialToken.CHANNEL, channel) if channel else ()
    body = (text,) if text else ()
    return [SpecialToken.START, author, *marked, *content_type, SpecialToken.MESSAGE, *body, end]


def _developer_text(conversation: Conversation, instructions: str) -> str:
    sections = []
    if instructions:
        sections += ["# Instructions", instructions]
    if conversation.tools:
        sections.append(_tools_section(conversation))
    answer = conversation.answer_format
    if answer is not None and answer.name is not None:
        described = [f"// {line}" for line in _lines(answer.description or "")]
        try:
            shown = "\n".join([*described, compact_json(answer.schema)])
            sections += ["# Response Formats", f"## {answer.name}", shown]
        except ValueError as error:
            raise InvalidRequest.at(answer.path, f"cannot be shown: {error}.") from error
    return "\n\n".join(sections)


def _tools_section(conversation: Conversation) -> str:
    names: set[str] = set()
    for tool in conversation.tools:
        path = f"{tool.path}.name"
        if tool.called in names:
            raise InvalidRequest.at(path, f"{tool.name!r} is not unique; every tool needs its own name.")
        if not tool.name or _UNFIT.search(tool.called):
            raise InvalidRequest.at(
                path, f"{tool.name!r} must not be empty or contain whitespace or any of '<>|='."
            )
        names.add(tool.called)
    sections = ["# Tools"]
    namespaces = {FUNCTIONS: Namespace(name=FUNCTIONS)}
    for namespace in conversation.namespaces:  # some clients name `functions`, too, or one twice
        namespaces.setdefault(namespace.name, namespace)
    for namespace in namespaces.values():
        tools = [tool for tool in conversation.tools if tool.namespace == namespace.name]
        if tools:
            lines = [f"## {namespace.name}", ""]
            lines += [f"// {line}" for line in _lines(namespace.description or "")]
            lines += [f"namespace {namespace.name} {{", ""]
            for tool in tools:
                lines += _tool(tool)
            sections.append("\n".join([*lines, f"}} // namespace {namespace.name}"]))
    return "\n\n".join(sections)


def _tool(tool: Tool) -> list[str]:
    description, signature, grammar = tool.description or "", "()", tool.grammar
    if grammar is not None:
        description += "\n" if description else ""
        description += f"The input follows this grammar ({grammar.syntax}):\n{grammar.text}"
    if tool.takes_text:
        signature = "(input: string)"
    elif tool.parameters is not None:
        path = f"{tool.path}.parameters"
        try:
            signature = f"(_: {type_of(tool.parameters)})"
        except ValueError as error:
            raise InvalidRequest.at(path, f"cannot be shown: {error}.") from error
    comments = [f"// {line}" for line in _lines(description)]
    return [*comments, f"type {tool.name} = {signature} => any;", ""]


def _lines(text: str) -> list[str]:
    """Lines as Rust's `str::lines` splits them: at LF or CRLF only, without an empty last line."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


MAX_DEPTH = 100
_PLAIN = {"number": "number", "integer": "number", "boolean": "boolean"}


def type_of(schema: object, indent: str = "", *, depth: int = 0) -> str:
    """The TypeScript type of a JSON schema; `any` if there is no equivalent.

    Raises ValueError for schemas or values that are nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    kind = "any"
    match schema:
        case {"oneOf": list(variants)}:
            kind = "".join([f"\n{_variant(v, _notes(v), indent, depth)}" for v in map(_dict, variants)])
        case {"type": list(names)}:
            kind = " | ".join(_PLAIN.get(name, name) for name in names if isinstance(name, str)) or "any"
        case {"type": "object"}:
            kind = _object(schema, indent, depth)
        case {"type": "array", "items": items}:
            kind = f"{type_of(items, indent, depth=depth + 1)}[]"
        case {"type": "array"}:
            kind = "Array<any>"
        case {"type": "string", "enum": list(values)}:
            kind = " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"
        case {"type": "string"}:
            kind = "string"
        case {"type": str(name)}:
            kind = _PLAIN.get(name, "any")
    return kind


def _object(schema: Any, indent: str, depth: int) -> str:
    lines = [*_comment(schema, indent), "{"]
    properties, required = schema.get("properties"), schema.get("required")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        mark = "" if isinstance(required, list) and key in required else "?"
        lines += _property(f"{indent}{key}{mark}:", _dict(value), indent, depth)
    return "\n".join([*lines, indent + "}"])


def _property(name: str, schema: dict[str, Any], indent: str, depth: int) -> list[str]:
    """The lines of one property: comments, `name: type,`, default."""
    lines = []
    if isinstance(title := schema.get("title"), str):
        lines += [f"{indent}// {title}", f"{indent}//"]
    if "oneOf" not in schema:
        lines += _comment(schema, indent)
    if isinstance(examples := schema.get("examples"), list) and examples:
        listed = [f'{indent}// - "{example}"' for example in examples if isinstance(example, str)]
        lines += [f"{indent}// Examples:", *listed]
    if isinstance(schema.get("oneOf"), list):
        return lines + _union(name, schema, indent, depth)
    default = "".join(f" // {note}" for note in _default(schema) if "oneOf" not in schema)
    return [*lines, f"{name} {_nullable_type(schema, indent + '    ', depth)},{default}"]


def _union(name: str, schema: dict[str, Any], indent: str, depth: int) -> list[str]:
    """A union has one line per variant; a description repeated by the first variant is written once."""
    description, variants = schema.get("description"), list(map(_dict, schema["oneOf"]))
    is_of_first = bool(variants) and description == variants[0].get("description")
    above = [] if is_of_first else _comment(schema, indent)
    lines = [*above, *[f"{indent}// {note}" for note in _default(schema)], name]
    for i, variant in enumerate(variants):
        own = variant.get("description")
        notes = [own] if isinstance(own, str) and own != description and not (i == 0 and above) else []
        lines.append(_variant(variant, notes + _default(variant), indent, depth))
    return [*lines, f"{indent},"]


def _notes(variant: dict[str, Any]) -> list[str]:
    """The notes of a variant of a union that is not a property."""
    notes = [note for note in [variant.get("description")] if isinstance(note, str)]
    if "default" in variant:
        default = variant["default"]
        quoted = isinstance(default, str) and not variant.get("enum")
        notes.append(f'default: "{default}"' if quoted else f"default: {compact_json(default)}")
    return notes


def _variant(variant: dict[str, Any], notes: list[str], indent: str, depth: int) -> str:
    trailing = f" // {' '.join(notes)}" if notes else ""
    return f"{indent} | {_nullable_type(variant, indent + '   ', depth)}{trailing}"


def _nullable_type(schema: dict[str, Any], indent: str, depth: int) -> str:
    text = type_of(schema, indent, depth=depth + 1)
    return f"{text} | null" if schema.get("nullable") is True and "null" not in text else text


def _default(schema: dict[str, Any]) -> list[str]:
    """The note on the default, if there is one. A string is quoted, unless it names an enum value."""
    if "default" not in schema:
        return []
    default, enum = schema["default"], schema.get("enum")
    if isinstance(default, str):
        return [f"default: {default}" if isinstance(enum, list) and enum else f'default: "{default}"']
    return [f"default: {compact_json(default)}"]


def _comment(schema: dict[str, Any], indent: str) -> list[str]:
    description = schema.get("description")
    return [f"{indent}// {description}"] if isinstance(description, str) else []


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def compact_json(value: object) -> str:
    """JSON as serde_json writes it: without spaces, 1e20 and not 1e+20. Raises ValueError for values nested
    too deeply."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error
