"""Chat completions: from the body to the turn, and from its deltas to chunks or one answer."""

from collections.abc import Sequence
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
from frontend.harmony.parse import Begin, Delta, Text
from frontend.http.answer import (
    ChoiceWriter,
    ChunkedAnswer,
    ContentLogprob,
    Envelope,
    UsageBody,
    content_logprobs,
)
from frontend.http.respond import Operations, asking, generating
from frontend.turn.choice import Choice, FinishReason
from frontend.turn.fields import (
    NEAREST_EFFORT,
    AnyEffort,
    CommonFields,
    Content,
    ConversationFields,
    Count,
    FunctionName,
    JsonObjectFormat,
    JsonSchemaFormat,
    Refused,
    StopText,
    StopTexts,
    TextFormat,
    answer_format,
    required,
    text_of_part,
)
from frontend.turn.request import CallChoice, TurnRequest
from frontend.turn.thoughts import PARAGRAPH, joined


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
    audio: None = None
    function_call: None = None


class InputGrammar(msgspec.Struct, kw_only=True):
    """A grammar in Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, msgspec.Meta(min_length=1)]


class InputFormat(msgspec.Struct, kw_only=True):
    """The format of a custom tool's input: any text, or text that follows the `grammar`."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


class ToolFields(msgspec.Struct, kw_only=True):
    """A tool the model may call: a function with the JSON schema of its `parameters`, or a custom tool with
    the `format` of its input, which is text."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool; it has the field that `type` names."""

    type: Literal["function", "custom"] = "function"
    function: ToolFields | None = None
    custom: ToolFields | None = None


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolDefinition], msgspec.Meta(min_length=1)]


class ChatToolChoice(ToolDefinition, kw_only=True):
    """`tool_choice`: the tool of this name must be called, or only those named may be, although the prompt
    shows all; it has the field that `type` names."""

    type: Literal["function", "custom", "allowed_tools"]  # type: ignore[assignment]  # one more
    allowed_tools: AllowedTools | None = None


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
    inexact: set[str] = set()
    offered = None if body.tool_choice == "none" else body.tools
    effort = body.effort_of(body.reasoning_effort)
    if NEAREST_EFFORT[effort] != effort:
        inexact.add("reasoning_effort")
    conversation = Conversation(
        turns=tuple(joined(_turn(each, f"messages[{i}]", inexact) for i, each in enumerate(body.messages))),
        tools=tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(offered or ())),
        reasoning_effort=NEAREST_EFFORT[effort],
        answer_format=answer_format(body.response_format, "response_format"),
    )
    request = TurnRequest(
        fields=body,
        prompt=conversation,
        calls=_call_choice(body.tool_choice),
        path="messages",
        num_bytes=num_bytes,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_choices=body.n,
        stop=body.stop,
        max_calls=body.max_calls,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return request, sorted(inexact)


def _by_type(given: ToolDefinition | MessageToolCall, path: str) -> Any:
    """The field that the type names. Raises InvalidRequest if it is missing."""
    return required(getattr(given, given.type) or None, f"{path}.{given.type}")


def _tool(given: ToolDefinition, path: str) -> Tool:
    tool: ToolFields = _by_type(given, path)
    path = f"{path}.{given.type}"
    takes_text, grammar = given.type == "custom", None
    if takes_text and tool.format is not None and tool.format.type == "grammar":
        where = f"{path}.format.grammar"
        held = required(tool.format.grammar, where)
        grammar = TextGrammar(syntax=held.syntax, text=held.definition, path=f"{where}.definition")
    return Tool(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        takes_text=takes_text,
        grammar=grammar,
        path=path,
    )


def _call_choice(choice: str | ChatToolChoice | None) -> CallChoice:
    if not isinstance(choice, ChatToolChoice):
        return CallChoice(must_call=choice == "required")
    named: ToolFields | AllowedTools = _by_type(choice, "tool_choice")
    if not isinstance(named, AllowedTools):
        return CallChoice(must_call=True, names=frozenset({named.name}))
    tools = enumerate(named.tools)
    names = frozenset(_by_type(tool, f"tool_choice.allowed_tools.tools[{i}]").name for i, tool in tools)
    return CallChoice(must_call=named.mode == "required", names=names)


def _turn(message: InputMessage, path: str, inexact: set[str]) -> Turn:
    if message.name is not None:
        inexact.add("messages[].name")
    match message.role:
        case "assistant":
            return _assistant_turn(message, path)
        case "tool":
            path_of_id = f"{path}.tool_call_id"
            call_id = required(message.tool_call_id, path_of_id)
            return ToolResult(call_id=call_id, text=_text(message.content, path, inexact), path=path_of_id)
        case "user":
            return UserTurn(_text(message.content, path))
        case _:
            return Instructions(_text(message.content, path))


def _assistant_turn(message: InputMessage, path: str) -> AssistantTurn:
    calls = []
    for i, given in enumerate(message.tool_calls or ()):
        call, is_custom = _by_type(given, f"{path}.tool_calls[{i}]"), given.type == "custom"
        text = call.input if is_custom else call.arguments
        calls.append(ToolCall(call_id=given.id, name=call.name, arguments=text, takes_text=is_custom))
    return AssistantTurn(
        reasoning=message.reasoning_content or message.reasoning or None,
        text=_text(message.content or message.refusal or "", path) or None,
        tool_calls=tuple(calls),
    )


def _text(content: Content | None, path: str, inexact: set[str] | None = None) -> str:
    """The text of a content at `path`. Parts that are not text are refused or, such as a picture of a screen
    in a tool's result, replaced by a note and named in `inexact`."""
    path = f"{path}.content"
    if isinstance(content, str):
        return content
    parts = enumerate(required(content, path))
    return "".join(text_of_part(part, f"{path}[{i}]", "messages[].content[]", inexact) for i, part in parts)


def chunked_answer(body: ChatBody, choices: Sequence[Choice]) -> ChunkedAnswer:
    """The answer to a body."""
    envelope = Envelope("chat.completion.chunk", "chatcmpl", choices[0].request.model, body)
    return ChunkedAnswer(envelope, choices, MessageWriter, ChatCompletion)


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the visible text."""

    content: list[ContentLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. `reasoning` and `reasoning_content` are the same text: clients read either."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoiceBody(msgspec.Struct, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/chat/completions`, unless streamed."""

    id: str
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: UsageBody
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: Literal["default"] = "default"


OPERATIONS: Operations = {
    ("POST", "/v1/chat/completions"): generating(
        asking(ChatBody, turn_request, chunked_answer),
        "Create a chat completion",
        ChatCompletion,
        ChatBody,
        {
            "messages": [{"role": "user", "content": "Hello there!"}],
            "reasoning_effort": "low",
            "max_completion_tokens": 100,
        },
    )
}

_encode = msgspec.json.Encoder().encode
_MORE_ARGUMENTS = b'{"index":%d,"function":{"arguments":%%b}}'
_MORE_INPUT = b'{"index":%d,"custom":{"input":%%b}}'
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


class MessageWriter(ChoiceWriter):
    """Builds the message of one choice."""

    def __init__(self, index: int, choice: Choice, envelope: Envelope) -> None:
        super().__init__(index, choice, envelope)
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._calls: list[tuple[Begin, list[str]]] = []
        self._logprobs: list[ContentLogprob] = []
        self._parts = self._texts  # of the open message; a preamble is a text
        self._separator = ""  # before its next text
        self._more = b""  # how more arguments of the open call are written
        self._head = self.head + b'{"index":%d,"delta":' % index
        self._text_head = self._head + b'{"content":'
        self._reasoning_head = self._head + b'{"reasoning":'
        self._plain_tail = b"}" + _NO_LOGPROBS + self.tail

    def opening(self) -> bytes:
        return self._head + b'{"role":"assistant","content":""' + self._plain_tail

    def write(self, deltas: Sequence[Delta]) -> bytes:
        chunks: list[bytes] = []
        for delta in deltas:
            match delta:
                case Text():
                    text, parts = delta.text, self._parts
                    if self._separator:
                        text, self._separator = self._separator + text, ""
                    parts.append(text)
                    encoded = _encode(text)
                    if parts is self._texts:
                        tail = self._plain_tail if self.choice.logprobs is None else self._scored_tail(delta)
                        chunks += self._text_head, encoded, tail
                    elif parts is not self._reasonings:
                        more = self._more % encoded
                        chunks += self._head, b'{"tool_calls":[', more, b"]", self._plain_tail
                    else:  # under both field names that clients read
                        twice = encoded, b',"reasoning_content":', encoded
                        chunks += self._reasoning_head, *twice, self._plain_tail
                case Begin("call"):
                    self._parts, self._separator = [], ""
                    self._calls.append((delta, self._parts))
                    call = self._call(delta)
                    self._more = (_MORE_ARGUMENTS if call.type == "function" else _MORE_INPUT) % delta.index
                    # Inserts the index as the object's first field.
                    begun = b'{"index":%d,' % delta.index + _encode(call)[1:]
                    chunks += (self._head, b'{"tool_calls":[', begun, b"]", self._plain_tail)
                case Begin(kind):
                    self._parts = self._reasonings if kind == "thought" else self._texts
                    self._separator = PARAGRAPH if self._parts else ""
        return b"".join(chunks) if self.stream else b""

    def end(self) -> bytes:
        reason = self.choice.finish_reason.encode()
        return self._head + b'{},"logprobs":null,"finish_reason":"%b"}' % reason + self.tail

    def body(self) -> ChatChoiceBody:
        """The whole choice; `content` is null if there are calls and no visible text."""
        text, reasoning = "".join(self._texts), "".join(self._reasonings)
        return ChatChoiceBody(
            index=self.index,
            message=ChatMessage(
                content=text if text or not self._calls else None,
                reasoning=reasoning or UNSET,
                reasoning_content=reasoning or UNSET,
                tool_calls=[self._call(start, "".join(parts)) for start, parts in self._calls] or UNSET,
            ),
            finish_reason=self.choice.finish_reason,
            logprobs=ChatLogprobs(content=self._logprobs) if self._logprobs else None,
        )

    def _scored_tail(self, delta: Text) -> bytes:
        scored = content_logprobs(self.choice.logprobs_of(delta) or (), self.choice.tokenizer)
        self._logprobs += scored
        logprobs = _encode(ChatLogprobs(content=scored))
        return b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self.tail

    def _call(self, start: Begin, text: str = "") -> MessageToolCall:
        tool = self.choice.tools.get(start.name)
        if tool is not None and tool.takes_text:
            custom = CustomCall(name=start.name, input=text)
            return MessageToolCall(id=start.call_id, type="custom", custom=custom)
        function = FunctionCall(name=start.name, arguments=text)
        return MessageToolCall(id=start.call_id, type="function", function=function)
