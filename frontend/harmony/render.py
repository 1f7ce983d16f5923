"""Renders a conversation as Harmony segments, ready to be tokenised."""

import re
from collections.abc import Iterator, Sequence

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    FUNCTIONS,
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    Namespace,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
    WrittenMessage,
    is_builtin,
)
from frontend.harmony.typescript import compact_json, type_of
from frontend.text.tokenizer import Segment, SpecialToken

# Names are single header words: whitespace would end them, `<` would look like a control token.
_UNFIT = re.compile(r"[\s<>|=]")
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
    results without a matching call.
    """
    turns = conversation.turns
    leading = []
    for turn in turns:
        if not isinstance(turn, Instructions):
            break
        leading.append(turn.text)

    segments = _message("system", _system_text(conversation))
    developer = _developer_text(conversation, "\n\n".join(filter(None, leading)))
    if developer:
        segments += _message("developer", developer)
    segments += _history(turns[len(leading) :])
    return [*segments, SpecialToken.START, "assistant"]


def _history(turns: tuple[Turn, ...]) -> list[Segment]:
    last_final = max((i for i, turn in enumerate(turns) if _is_final(turn)), default=-1)
    called: dict[str, str] = {}
    segments: list[Segment] = []
    for i, turn in enumerate(turns):
        match turn:
            case Instructions(text=text):
                segments += _message("developer", f"# Instructions\n\n{text}")
            case UserTurn(text=text):
                segments += _message("user", text)
            case AssistantTurn():
                called |= {call.call_id: _recipient(call) for call in turn.tool_calls}
                segments += _assistant(turn, called, keeps_reasoning=i > last_final)
            case ToolResult():
                segments += _tool_result(turn, called)
    return segments


def _is_final(turn: Turn) -> bool:
    """Whether the turn is a final answer; text next to calls is a preamble."""
    return isinstance(turn, AssistantTurn) and bool(turn.text) and not turn.tool_calls


def _assistant(turn: AssistantTurn, called: dict[str, str], *, keeps_reasoning: bool) -> Iterator[Segment]:
    if turn.written:
        yield from _written(turn.written, keeps_reasoning=keeps_reasoning)
        return
    if turn.reasoning and keeps_reasoning:
        yield from _message("assistant", turn.reasoning, channel="analysis")
    if turn.preamble:
        yield from _message("assistant", turn.preamble, channel="commentary")
    # Clients send whitespace with calls that the model wrote without text.
    if turn.text and not (turn.tool_calls and turn.text.isspace()):
        channel = "commentary" if turn.tool_calls else "final"
        yield from _message("assistant", turn.text, channel=channel)
    for call in turn.tool_calls:
        recipient = called[call.call_id]
        is_function = not is_builtin(recipient)
        yield from _message(
            f"assistant to={recipient}",
            call.arguments,
            channel="commentary" if is_function else "analysis",
            content_type=_JSON if is_function and not call.takes_text else (" code",),
            end=SpecialToken.CALL,
        )


def _written(messages: Sequence[WrittenMessage], *, keeps_reasoning: bool) -> Iterator[Segment]:
    for message in messages:
        if message.kind == "thought" and not keeps_reasoning:
            continue
        if message.is_first:
            yield SpecialToken.START
            yield "assistant"
        yield message.token_ids


def _tool_result(turn: ToolResult, called: dict[str, str]) -> list[Segment]:
    recipient = called.get(turn.call_id)
    if recipient is None:
        raise InvalidRequest(f"`{turn.path}`: no earlier tool call has id {turn.call_id!r}.", param=turn.path)
    channel = "analysis" if is_builtin(recipient) else "commentary"
    return _message(f"{recipient} to=assistant", turn.text, channel=channel)


def _recipient(call: ToolCall) -> str:
    """The recipient of a call. The model may have made up its name, so an invalid one is sanitised."""
    name = _UNFIT.sub("_", call.name.removeprefix("functions.")) or "_"
    namespace = _UNFIT.sub("_", call.namespace)
    return f"{namespace}.{name}"


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


def _system_text(conversation: Conversation) -> str:
    top = [conversation.model_identity, f"Knowledge cutoff: {conversation.knowledge_cutoff}"]
    if conversation.current_date is not None:
        top.append(f"Current date: {conversation.current_date}")
    sections = ["\n".join(top), f"Reasoning: {conversation.reasoning_effort}"]
    sections.append(f"{_CHANNELS}\n{_FUNCTIONS_CHANNEL}" if conversation.tools else _CHANNELS)
    return "\n\n".join(sections)


def _developer_text(conversation: Conversation, instructions: str) -> str:
    sections = []
    if instructions:
        sections += ["# Instructions", instructions]
    if conversation.tools:
        sections.append(_tools_section(conversation))
    answer = conversation.answer_format
    if answer is not None and answer.name is not None:
        sections += ["# Response Formats", f"## {answer.name}", _schema_text(answer)]
    return "\n\n".join(sections)


def _tools_section(conversation: Conversation) -> str:
    names: set[str] = set()
    for tool in conversation.tools:
        _check_name(tool, names)
        names.add(tool.called)
    sections = ["# Tools"]
    namespaces = {FUNCTIONS: Namespace(name=FUNCTIONS)}
    for namespace in conversation.namespaces:  # some clients name `functions`, too, or one twice
        namespaces.setdefault(namespace.name, namespace)
    for namespace in namespaces.values():
        tools = [tool for tool in conversation.tools if tool.namespace == namespace.name]
        if tools:
            sections.append(_namespace_section(namespace, tools))
    return "\n\n".join(sections)


def _namespace_section(namespace: Namespace, tools: Sequence[Tool]) -> str:
    lines = [f"## {namespace.name}", ""]
    lines += [f"// {line}" for line in _lines(namespace.description or "")]
    lines += [f"namespace {namespace.name} {{", ""]
    for tool in tools:
        lines += [f"// {line}" for line in _lines(_description(tool))]
        lines += [f"type {tool.name} = {_signature(tool)} => any;", ""]
    return "\n".join([*lines, f"}} // namespace {namespace.name}"])


def _description(tool: Tool) -> str:
    if tool.grammar is None:
        return tool.description or ""
    description = f"{tool.description}\n" if tool.description else ""
    return f"{description}The input follows this grammar ({tool.grammar.syntax}):\n{tool.grammar.text}"


def _signature(tool: Tool) -> str:
    if tool.takes_text:
        return "(input: string)"
    if tool.parameters is None:
        return "()"
    try:
        return f"(_: {type_of(tool.parameters)})"
    except ValueError as error:
        path = f"{tool.path}.parameters"
        raise InvalidRequest(f"`{path}`: {error}.", param=path) from error


def _schema_text(answer: AnswerFormat) -> str:
    schema = answer.schema
    if answer.description is not None and isinstance(schema, dict):
        schema = {"description": answer.description} | schema
    try:
        return compact_json(schema)
    except ValueError as error:
        raise InvalidRequest(f"`{answer.path}`: {error}.", param=answer.path) from error


def _lines(text: str) -> list[str]:
    """Lines as Rust's `str::lines` splits them: at LF or CRLF only, without an empty last line."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _check_name(tool: Tool, others: set[str]) -> None:
    path = f"{tool.path}.name"
    if tool.called in others:
        raise InvalidRequest(
            f"`{path}` {tool.name!r} is not unique; every tool needs its own name.", param=path
        )
    if not tool.name or _UNFIT.search(tool.called):
        raise InvalidRequest(
            f"`{path}` {tool.name!r} must not be empty or contain whitespace or any of '<>|='.", param=path
        )
