"""Converts a chat completion body into a TurnRequest."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from baton.errors import InvalidRequest
from frontend.chat.body import (
    AllowedToolsChoice,
    AssistantMessage,
    ChatBody,
    Content,
    CustomChoice,
    CustomTool,
    DeveloperMessage,
    FunctionChoice,
    Message,
    MessageToolCall,
    Part,
    SystemMessage,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from frontend.harmony.conversation import (
    AnswerFormat,
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
    AnyEffort,
    JsonObjectFormat,
    TextFormat,
    effort_of,
    identity_of,
)
from frontend.turn.form import CallChoice, any_object, by_schema
from frontend.turn.request import TurnRequest, left_out

T = TypeVar("T")


def turn_request(body: ChatBody, num_bytes: int) -> TurnRequest:
    """The request of a body of `num_bytes`. Raises InvalidRequest for contradictory fields and for content
    that is not text."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    return TurnRequest(
        model=body.model,
        prompt=conversation(body),
        path="messages",
        num_bytes=num_bytes,
        sampling=body,
        user=body.end_user,
        call_choice=_call_choice(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_choices=body.n or 1,
        stop_strings=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


def not_enforced(body: ChatBody) -> Iterator[str]:
    """Paths of known fields that are not honoured exactly."""
    if any(message.name is not None for message in body.messages):
        yield "messages[].name"
    if effort(body) not in GPT_OSS_EFFORTS:
        yield "reasoning_effort"
    results = (message.content for message in body.messages if isinstance(message, ToolMessage))
    parts = (part for content in results if not isinstance(content, str) for part in content)
    yield from sorted({f"messages[].content[].{part.type}"[:80] for part in parts if not _is_text(part)})


def gives_reasoning(body: ChatBody) -> bool:
    """Whether the answer contains the reasoning."""
    is_excluded = body.reasoning is not None and body.reasoning.exclude
    return body.include_reasoning is not False and not is_excluded


def conversation(body: ChatBody) -> Conversation:
    """The body as a conversation; `tool_choice` none leaves the tools out.

    Raises InvalidRequest, naming the field, for content that is not text.
    """
    args = (body.chat_template_args, body.chat_template_kwargs)
    return Conversation(
        turns=tuple(turns(body.messages)),
        tools=() if body.tool_choice == "none" else tools(body.tools or ()),
        reasoning_effort=NEAREST_EFFORT[effort(body)],
        model_identity=identity_of(*args),
        answer_format=_answer_format(body),
    )


def effort(body: ChatBody) -> AnyEffort:
    """The reasoning effort, from whichever field gives it."""
    said = body.reasoning_effort or (None if body.reasoning is None else body.reasoning.effort)
    return effort_of(said, body.chat_template_args, body.chat_template_kwargs)


def tools(given: Sequence[ToolDefinition]) -> tuple[Tool, ...]:
    """The tools for the prompt. Raises InvalidRequest if one lacks the field that its type names."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))


def _tool(tool: ToolDefinition, path: str) -> Tool:
    if tool.type == "custom":
        custom = _present(tool.custom, f"{path}.custom")
        return Tool(
            name=custom.name,
            description=custom.description,
            takes_text=True,
            grammar=_grammar(custom, f"{path}.custom.format.grammar"),
            path=f"{path}.custom",
        )
    function = _present(tool.function, f"{path}.function")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=bool(function.strict),
        path=f"{path}.function",
    )


def _grammar(tool: CustomTool, path: str) -> TextGrammar | None:
    if tool.format is None or tool.format.type == "text":
        return None
    grammar = _present(tool.format.grammar, path)
    return TextGrammar(syntax=grammar.syntax, text=grammar.definition, path=f"{path}.definition")


def _present(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidRequest(f"`{path}` is missing.", param=path)
    return value


def _call_choice(body: ChatBody) -> CallChoice:
    match body.tool_choice:
        case FunctionChoice(function=function):
            return CallChoice(must_call=True, names=frozenset({function.name}))
        case CustomChoice(custom=custom):
            return CallChoice(must_call=True, names=frozenset({custom.name}))
        case AllowedToolsChoice(allowed_tools=allowed):
            path = "tool_choice.allowed_tools.tools"
            named = (
                _present(tool.custom if tool.type == "custom" else tool.function, f"{path}[{i}].{tool.type}")
                for i, tool in enumerate(allowed.tools)
            )
            names = frozenset(tool.name for tool in named)
            return CallChoice(must_call=allowed.mode == "required", names=names)
        case choice:
            return CallChoice(may_call=choice != "none", must_call=choice == "required")


def _answer_format(body: ChatBody) -> AnswerFormat | None:
    match body.response_format:
        case None | TextFormat():
            return None
        case JsonObjectFormat():
            return any_object("response_format")
        case answer:
            return by_schema(answer.json_schema, "response_format.json_schema.schema")


def turns(messages: Sequence[Message]) -> Iterator[Turn]:
    """The messages as turns. Raises InvalidRequest, naming the field, for content that is not text."""
    for i, message in enumerate(messages):
        path = f"messages[{i}]"
        match message:
            case SystemMessage() | DeveloperMessage():
                yield Instructions(_text(message.content, path))
            case UserMessage():
                yield UserTurn(_text(message.content, path))
            case AssistantMessage():
                yield _assistant_turn(message, path)
            case ToolMessage():
                text = _result_text(message.content, path)
                yield ToolResult(call_id=message.tool_call_id, text=text, path=f"{path}.tool_call_id")


def _assistant_turn(message: AssistantMessage, path: str) -> AssistantTurn:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest(f"`{path}.{name}` is not supported.", param=f"{path}.{name}")
    return AssistantTurn(
        reasoning=message.reasoning_content or message.reasoning or None,
        text=_text(message.content or message.refusal or "", path) or None,
        tool_calls=tuple(
            _call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
        ),
    )


def _call(call: MessageToolCall, path: str) -> ToolCall:
    if call.type == "custom":
        custom = _present(call.custom, f"{path}.custom")
        return ToolCall(call_id=call.id, name=custom.name, arguments=custom.input, takes_text=True)
    function = _present(call.function, f"{path}.function")
    return ToolCall(call_id=call.id, name=function.name, arguments=function.arguments)


def _text(content: Content, path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))


def _result_text(content: Content, path: str) -> str:
    """A tool's result: what is not text, such as a picture of a screen, is replaced by a note."""
    if isinstance(content, str):
        return content
    parts = [part if _is_text(part) else Part(type="text", text=left_out(part.type)) for part in content]
    return _text(parts, path)


def _is_text(part: Part) -> bool:
    return part.type in {"text", "refusal"}


def _part_text(part: Part, path: str) -> str:
    if not _is_text(part):
        raise InvalidRequest(
            f"`{path}.type` {part.type!r:.80} is not supported; this model reads text only.",
            param=f"{path}.type",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidRequest(f"`{path}.{part.type}` is missing.", param=f"{path}.{part.type}")
    return text
