"""A conversation as Harmony segments, ready to be tokenised: the prompt that gpt-oss was trained to read."""

import re
from collections.abc import Iterator, Sequence

from baton.errors import InvalidRequest
from frontend.harmony.builtin_tools import BUILTIN_TOOLS, builtin_tools_section, is_builtin
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
)
from frontend.harmony.typescript import compact_json, type_of
from frontend.text.specials import Segment, SpecialToken

# A name is one word of a header: white space would end it, `<` would look like a control token.
_UNFIT = re.compile(r"[\s<>|=]")
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
# As the model writes it; a plain ` json` is a mistake of the Hugging Face template (openai/harmony issue 91).
_JSON = (" ", SpecialToken.CONSTRAIN, "json")
_FUNCTIONS_CHANNEL = "Calls to these tools must go to the commentary channel: 'functions'."


def render(conversation: Conversation) -> list[Segment]:
    """The whole prompt, up to `<|start|>assistant`, after which the model writes its header.

    Instructions before the first other turn are joined, with a blank line between them, in the developer
    message that also carries tools and response format; later ones stay where they were said. Reasoning is
    left out of every turn up to the last final answer and kept after it, where a chain of tool calls is
    still running. The text of a message is one segment, so that what was said in earlier turns stays equal
    from request to request and its tokens can be cached.

    Raises InvalidRequest, naming the field, if a tool's name cannot stand in a header or is not a built-in
    one, a schema is nested too deeply, or a tool result answers no call of the history.
    """
    turns = conversation.turns
    num_leading = next((i for i, turn in enumerate(turns) if not isinstance(turn, Instructions)), len(turns))
    leading = [turn.text for turn in turns[:num_leading] if isinstance(turn, Instructions)]

    segments = [*_message("system", _system_text(conversation))]
    developer = _developer_text(conversation, "\n\n".join(text for text in leading if text))
    if developer:
        segments += _message("developer", developer)
    segments += _history(turns[num_leading:], conversation.builtin_tools)
    return [*segments, SpecialToken.START, "assistant"]


def _history(turns: tuple[Turn, ...], builtin_tools: tuple[str, ...]) -> Iterator[Segment]:
    last_final = max((i for i, turn in enumerate(turns) if _is_final(turn)), default=-1)
    called: dict[str, str] = {}
    for i, turn in enumerate(turns):
        match turn:
            case Instructions(text=text):
                yield from _message("developer", f"# Instructions\n\n{text}")
            case UserTurn(text=text):
                yield from _message("user", text)
            case AssistantTurn():
                called |= {call.call_id: _recipient(call, builtin_tools) for call in turn.tool_calls}
                yield from _assistant(turn, called, keeps_reasoning=i > last_final)
            case ToolResult():
                yield from _tool_result(turn, called)


def _is_final(turn: Turn) -> bool:
    """Whether the turn ends with an answer; text beside calls is only a preamble."""
    return isinstance(turn, AssistantTurn) and bool(turn.text) and not turn.tool_calls


def _assistant(turn: AssistantTurn, called: dict[str, str], *, keeps_reasoning: bool) -> Iterator[Segment]:
    if turn.written:
        yield from _written(turn.written, keeps_reasoning=keeps_reasoning)
        return
    if turn.reasoning and keeps_reasoning:
        yield from _message("assistant", turn.reasoning, channel="analysis")
    if turn.preamble:
        yield from _message("assistant", turn.preamble, channel="commentary")
    # Clients send white space next to calls where the model wrote no text.
    if turn.text and not (turn.tool_calls and turn.text.isspace()):
        channel = "commentary" if turn.tool_calls else "final"
        yield from _message("assistant", turn.text, channel=channel)
    for call in turn.tool_calls:
        recipient = called[call.call_id]
        is_function = _is_function(recipient)
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


def _tool_result(turn: ToolResult, called: dict[str, str]) -> Iterator[Segment]:
    recipient = called.get(turn.call_id)
    if recipient is None:
        raise InvalidRequest(
            f"`{turn.path}`: no earlier tool call has the id {turn.call_id!r}.", param=turn.path
        )
    channel = "commentary" if _is_function(recipient) else "analysis"
    yield from _message(f"{recipient} to=assistant", turn.text, channel=channel)


def _recipient(call: ToolCall, builtin_tools: tuple[str, ...]) -> str:
    """A name that the model made up comes back in the history: it is mended, where a tool's is refused."""
    name = _UNFIT.sub("_", call.name.removeprefix("functions.")) or "_"
    namespace = _UNFIT.sub("_", call.namespace)
    return name if is_builtin(name, builtin_tools) else f"{namespace}.{name}"


def _is_function(recipient: str) -> bool:
    """Functions are called on commentary with JSON; built-in tools on analysis, with `code`."""
    return recipient.partition(".")[0] not in BUILTIN_TOOLS


def _message(
    author: str,
    text: str,
    *,
    channel: str | None = None,
    content_type: tuple[Segment, ...] = (),
    end: SpecialToken = SpecialToken.END,
) -> Iterator[Segment]:
    yield SpecialToken.START
    yield author
    if channel:
        yield SpecialToken.CHANNEL
        yield channel
    yield from content_type
    yield SpecialToken.MESSAGE
    if text:
        yield text
    yield end


def _system_text(conversation: Conversation) -> str:
    top = [conversation.model_identity, f"Knowledge cutoff: {conversation.knowledge_cutoff}"]
    if conversation.current_date is not None:
        top.append(f"Current date: {conversation.current_date}")
    sections = ["\n".join(top), f"Reasoning: {conversation.reasoning_effort}"]
    if conversation.builtin_tools:
        unknown = set(conversation.builtin_tools) - set(BUILTIN_TOOLS)
        if unknown:
            raise InvalidRequest(f"There is no built-in tool {min(unknown)!r}.", param="tools")
        sections.append(builtin_tools_section(conversation.builtin_tools))
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
    for namespace in (Namespace(name=FUNCTIONS), *conversation.namespaces):
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
    said = f"{tool.description}\n" if tool.description else ""
    return f"{said}The input follows this grammar ({tool.grammar.syntax}):\n{tool.grammar.text}"


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
    """Lines as Rust's `str::lines` cuts them: at LF or CRLF only, without an empty last one."""
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _check_name(tool: Tool, others: set[str]) -> None:
    path = f"{tool.path}.name"
    if tool.called in others:
        raise InvalidRequest(f"`{path}`: another tool is called {tool.name!r}, too.", param=path)
    if not tool.name or _UNFIT.search(tool.called):
        raise InvalidRequest(f"`{path}` {tool.name!r} must be one word without any of '<>|='.", param=path)
