"""The chat completion body, and its conversion into a TurnRequest."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.errors import InvalidRequest
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
    NEAREST_EFFORT,
    TEXT_TYPES,
    AnyEffort,
    CommonFields,
    Content,
    ConversationFields,
    Count,
    FunctionName,
    JsonObjectFormat,
    NamedSchema,
    Refused,
    StopText,
    StopTexts,
    TextFormat,
    left_out,
    required,
    text_of_part,
)
from frontend.turn.form import CallChoice, answer_format, demanded
from frontend.turn.request import TurnRequest


class FunctionCall(msgspec.Struct, kw_only=True):
    """A called function; `arguments` is text as the model wrote it, valid JSON or not."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct, kw_only=True):
    """A called custom tool and its input."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A tool call that the model requests; it has the field that `type` names."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | UnsetType | None = UNSET
    custom: CustomCall | UnsetType | None = UNSET


class InputMessage(msgspec.Struct, kw_only=True):
    """A message. `system` and `developer` give instructions; `assistant` is an earlier answer, as this server
    returned it, the only one that may lack `content`; `tool` is the result of the call `tool_call_id`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function the model may call; `parameters` is its JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputGrammar(msgspec.Struct, kw_only=True):
    """A grammar in Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, msgspec.Meta(min_length=1)]


class InputFormat(msgspec.Struct, kw_only=True):
    """The format of a custom tool's input: any text, or text that follows the `grammar`."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool whose input is text."""

    name: FunctionName
    description: str | None = None
    format: InputFormat | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool; it has the field that `type` names."""

    type: Literal["function", "custom"] = "function"
    function: FunctionTool | None = None
    custom: CustomTool | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolDefinition], msgspec.Meta(min_length=1)]


class ChatToolChoice(ToolDefinition, kw_only=True):
    """`tool_choice`: the tool of this name must be called, or only those named may be, although the prompt
    shows all; it has the field that `type` names."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]  # one more
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that follows a schema; without `strict`, some keywords may be ignored."""

    json_schema: NamedSchema


class ChatBody(ConversationFields, kw_only=True):
    """`POST /v1/chat/completions`. An extension: `chat_template_args` (or `chat_template_kwargs`)."""

    refused: ClassVar[Refused] = {
        "audio": ((), "This model outputs text only."),
        "modalities": ((["text"],), 'This model outputs text only; send ["text"].'),
        "functions": (([],), "It is deprecated; use `tools`."),
        "function_call": (("none", "auto"), "It is deprecated; use `tool_choice`."),
        "web_search_options": ((), "Web search is not available; offer a search function in `tools`."),
        "moderation": ((), "Moderation is not available."),
    }
    hints: ClassVar[frozenset[str]] = CommonFields.hints | {"store", "prediction"}
    shallow: ClassVar[frozenset[str]] = frozenset({"messages"})

    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Count | None = None
    stop: StopText | StopTexts | None = None
    logprobs: bool | None = None
    reasoning_effort: AnyEffort | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest.at("top_logprobs", "needs `logprobs`: true.")


def turn_request(body: ChatBody, num_bytes: int) -> tuple[TurnRequest, list[str]]:
    """The request of a body of `num_bytes`, and the paths of known fields that are not honoured exactly.
    Raises InvalidRequest for fields that contradict each other and for content that is not text."""
    prompt, calls = conversation(body), _call_choice(body.tool_choice)
    request = TurnRequest(
        fields=body,
        prompt=prompt,
        form=demanded(body, prompt, calls),
        path="messages",
        num_bytes=num_bytes,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n,
        stop=body.stop,
        max_calls=body.max_calls,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    inexact = ["messages[].name"] if any(message.name is not None for message in body.messages) else []
    if NEAREST_EFFORT[effort := body.effort_of(body.reasoning_effort)] != effort:
        inexact.append("reasoning_effort")
    results = (message.content for message in body.messages if message.role == "tool")
    kinds = {part.type for content in results if isinstance(content, list) for part in content}
    inexact += sorted(f"messages[].content[].{kind}"[:80] for kind in kinds - TEXT_TYPES)
    return request, inexact


def conversation(body: ChatBody) -> Conversation:
    """The body as a conversation; `tool_choice` none leaves the tools out.

    Raises InvalidRequest, naming the field, for content that is not text."""
    offered = None if body.tool_choice == "none" else body.tools
    form, path = body.response_format, "response_format"
    if isinstance(form, JsonSchemaFormat):
        answer = answer_format(form.json_schema, f"{path}.json_schema")
    else:
        answer = answer_format(form, path)
    return Conversation(
        turns=tuple(_turn(message, f"messages[{i}]") for i, message in enumerate(body.messages)),
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ())),
        reasoning_effort=NEAREST_EFFORT[body.effort_of(body.reasoning_effort)],
        answer_format=answer,
    )


def _by_type(given: ToolDefinition | MessageToolCall, path: str) -> Any:
    """The field that the type names. Raises InvalidRequest if it is missing."""
    return required(getattr(given, given.type) or None, f"{path}.{given.type}")


def _tool(given: ToolDefinition, path: str) -> Tool:
    tool: FunctionTool | CustomTool = _by_type(given, path)
    path = f"{path}.{given.type}"
    if isinstance(tool, FunctionTool):
        return Tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=bool(tool.strict),
            path=path,
        )
    grammar = None
    if tool.format is not None and tool.format.type == "grammar":
        where = f"{path}.format.grammar"
        held = required(tool.format.grammar, where)
        grammar = TextGrammar(syntax=held.syntax, text=held.definition, path=f"{where}.definition")
    return Tool(name=tool.name, description=tool.description, takes_text=True, grammar=grammar, path=path)


def _call_choice(choice: str | ChatToolChoice | None) -> CallChoice:
    if not isinstance(choice, ChatToolChoice):
        return CallChoice(must_call=choice == "required")
    named: FunctionTool | CustomTool | AllowedTools = _by_type(choice, "tool_choice")
    if not isinstance(named, AllowedTools):
        return CallChoice(must_call=True, names=frozenset({named.name}))
    tools = enumerate(named.tools)
    names = frozenset(_by_type(tool, f"tool_choice.allowed_tools.tools[{i}]").name for i, tool in tools)
    return CallChoice(must_call=named.mode == "required", names=names)


def _turn(message: InputMessage, path: str) -> Turn:
    match message.role:
        case "assistant":
            return _assistant_turn(message, path)
        case "tool":
            path_of_id = f"{path}.tool_call_id"
            call_id = required(message.tool_call_id, path_of_id)
            text = _text(message.content, path, reads_others=True)
            return ToolResult(call_id=call_id, text=text, path=path_of_id)
        case "user":
            return UserTurn(_text(message.content, path))
        case _:
            return Instructions(_text(message.content, path))


def _assistant_turn(message: InputMessage, path: str) -> AssistantTurn:
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest.at(f"{path}.{name}", "is not supported.")
    calls = []
    for i, given in enumerate(message.tool_calls or ()):
        call: FunctionCall | CustomCall = _by_type(given, f"{path}.tool_calls[{i}]")
        is_custom = isinstance(call, CustomCall)
        text = call.input if isinstance(call, CustomCall) else call.arguments
        calls.append(ToolCall(call_id=given.id, name=call.name, arguments=text, takes_text=is_custom))
    return AssistantTurn(
        reasoning=message.reasoning_content or message.reasoning or None,
        text=_text(message.content or message.refusal or "", path) or None,
        tool_calls=tuple(calls),
    )


def _text(content: Content | None, path: str, *, reads_others: bool = False) -> str:
    """The text of a content at `path`. Parts that are not text, such as a picture of a screen in a tool's
    result, are refused or replaced by a note."""
    path = f"{path}.content"
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(required(content, path)):
        text = text_of_part(part, f"{path}[{i}]")
        if text is None and not reads_others:
            raise InvalidRequest.at(
                f"{path}[{i}].type", f"{part.type!r:.80} is not supported; this model reads text only."
            )
        texts.append(left_out(part.type) if text is None else text)
    return "".join(texts)
