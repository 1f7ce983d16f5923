"""Converts a chat completion body into a TurnRequest."""

from collections.abc import Iterator, Sequence
from typing import Any

from baton.errors import InvalidRequest
from frontend.chat.body import (
    AllowedTool,
    AllowedTools,
    ChatBody,
    CustomCall,
    CustomTool,
    FunctionCall,
    FunctionTool,
    JsonSchemaFormat,
    Message,
    MessageToolCall,
    NamedTool,
    ToolChoice,
    ToolDefinition,
)
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Instructions,
    TextGrammar,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.turn.fields import (
    GPT_OSS_EFFORTS,
    NEAREST_EFFORT,
    TEXT_TYPES,
    AnyEffort,
    Content,
    effort_of,
    identity_of,
    required,
)
from frontend.turn.form import CallChoice, answer_format
from frontend.turn.request import Limits, TurnRequest, left_out, text_of_part


def turn_request(body: ChatBody, num_bytes: int) -> TurnRequest:
    """The request of a body of `num_bytes`. Raises InvalidRequest for fields that contradict each other and
    for content that is not text."""
    limits = Limits(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n or 1,
        stop=body.stop,
        max_calls=1 if body.parallel_tool_calls is False else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    talk, choice = conversation(body), _call_choice(body)
    return TurnRequest.of(body, talk, limits, choice, path="messages", num_bytes=num_bytes)


def not_enforced(body: ChatBody) -> Iterator[str]:
    """Paths of known fields that are not honoured exactly."""
    if any(message.name is not None for message in body.messages):
        yield "messages[].name"
    if _effort(body) not in GPT_OSS_EFFORTS:
        yield "reasoning_effort"
    results = (message.content for message in body.messages if message.role == "tool")
    kinds = {part.type for content in results if isinstance(content, list) for part in content}
    yield from sorted(f"messages[].content[].{kind}"[:80] for kind in kinds - TEXT_TYPES)


def gives_reasoning(body: ChatBody) -> bool:
    """Whether the answer contains the reasoning."""
    is_excluded = body.reasoning is not None and body.reasoning.exclude
    return body.include_reasoning is not False and not is_excluded


def conversation(body: ChatBody) -> Conversation:
    """The body as a conversation; `tool_choice` none leaves the tools out.

    Raises InvalidRequest, naming the field, for content that is not text.
    """
    form, path = body.response_format, "response_format"
    if isinstance(form, JsonSchemaFormat):
        answer = answer_format(form.json_schema, f"{path}.json_schema")
    else:
        answer = answer_format(form, path)
    return Conversation(
        turns=turns(body.messages),
        tools=() if body.tool_choice == "none" else tools(body.tools or ()),
        reasoning_effort=NEAREST_EFFORT[_effort(body)],
        model_identity=identity_of(body.chat_template_args, body.chat_template_kwargs),
        answer_format=answer,
    )


def _effort(body: ChatBody) -> AnyEffort:
    given = body.reasoning_effort or (None if body.reasoning is None else body.reasoning.effort)
    return effort_of(given, body.chat_template_args, body.chat_template_kwargs)


def tools(given: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """The tools for the prompt. Raises InvalidRequest if one lacks the field that its type names."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))


def _tool(given: ToolDefinition, path: str) -> Tool:
    tool: FunctionTool | CustomTool = _by_type(given, path)
    path = f"{path}.{given.type}"
    if isinstance(tool, CustomTool):
        return Tool(
            name=tool.name,
            description=tool.description,
            takes_text=True,
            grammar=_grammar(tool, f"{path}.format.grammar"),
            path=path,
        )
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        path=path,
    )


def _by_type(given: ToolDefinition | ToolChoice | AllowedTool | MessageToolCall, path: str) -> Any:
    """The field that the type names. Raises InvalidRequest if it is missing."""
    return required(getattr(given, given.type), f"{path}.{given.type}")


def _grammar(tool: CustomTool, path: str) -> TextGrammar | None:
    if tool.format is None or tool.format.type == "text":
        return None
    grammar = required(tool.format.grammar, path)
    return TextGrammar(syntax=grammar.syntax, text=grammar.definition, path=f"{path}.definition")


def _call_choice(body: ChatBody) -> CallChoice:
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return CallChoice(must_call=choice == "required")
    named: NamedTool | AllowedTools = _by_type(choice, "tool_choice")
    if isinstance(named, NamedTool):
        return CallChoice(must_call=True, names=frozenset({named.name}))
    allowed = (
        _by_type(tool, f"tool_choice.allowed_tools.tools[{i}]").name for i, tool in enumerate(named.tools)
    )
    return CallChoice(must_call=named.mode == "required", names=frozenset(allowed))


def turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """The messages as turns. Raises InvalidRequest, naming the field, for content that is not text."""
    return tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(messages))


def _turn(message: Message, path: str) -> Turn:
    if message.role == "assistant":
        return _assistant_turn(message, path)
    match message.role:
        case "tool":
            path_of_id = f"{path}.tool_call_id"
            call_id = required(message.tool_call_id, path_of_id)
            return ToolResult(
                call_id=call_id, text=_text(message.content, path, reads_others=True), path=path_of_id
            )
        case "user":
            return UserTurn(_text(message.content, path))
        case _:
            return Instructions(_text(message.content, path))


def _assistant_turn(message: Message, path: str) -> AssistantTurn:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
    calls = enumerate(message.tool_calls or ())
    return AssistantTurn(
        reasoning=message.reasoning_content or message.reasoning or None,
        text=_text(message.content or message.refusal or "", path) or None,
        tool_calls=tuple(_call(call, f"{path}.tool_calls[{i}]") for i, call in calls),
    )


def _call(given: MessageToolCall, path: str) -> ToolCall:
    call: FunctionCall | CustomCall = _by_type(given, path)
    if isinstance(call, CustomCall):
        return ToolCall(call_id=given.id, name=call.name, arguments=call.input, takes_text=True)
    return ToolCall(call_id=given.id, name=call.name, arguments=call.arguments)


def _text(content: Content | None, path: str, *, reads_others: bool = False) -> str:
    """The text of a content at `path`. Parts that are not text, such as a picture of a screen in a tool's
    result, are refused or replaced by a note."""
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"`{path}.content` is missing.", param=f"{path}.content")
    texts = []
    for i, part in enumerate(content):
        where = f"{path}.content[{i}]"
        text = text_of_part(part, where)
        if text is None and not reads_others:
            raise InvalidRequest(
                f"`{where}.type` {part.type!r:.80} is not supported; this model reads text only.",
                param=f"{where}.type",
            )
        texts.append(left_out(part.type) if text is None else text)
    return "".join(texts)
