"""One message of a chat completion: a choice's deltas as stream chunks and as the whole message."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from frontend.chat.body import CustomCall, FunctionCall
from frontend.harmony.conversation import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice, FinishReason
from frontend.turn.chunks import Envelope, UsageBody
from frontend.turn.logprobs import ContentLogprob, content_logprobs
from frontend.turn.thoughts import PARAGRAPH


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the visible text."""

    content: list[ContentLogprob]
    refusal: None = None


class ToolCallBody(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """A function call that the model requests."""

    id: str
    function: FunctionCall


class CustomCallBody(msgspec.Struct, kw_only=True, tag_field="type", tag="custom"):
    """A custom tool call that the model requests."""

    id: str
    custom: CustomCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. `reasoning` and `reasoning_content` are the same text, under both names that clients
    read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody | CustomCallBody] | UnsetType = UNSET


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
    metadata: dict[str, str] | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


class MessageWriter:
    """Builds the message of one choice; without an `envelope` it produces no stream chunks. Calls of
    `text_tools` are output as custom tool calls."""

    def __init__(
        self,
        index: int,
        choice: Choice,
        tokenizer: ModelTokenizer,
        envelope: Envelope | None,
        *,
        gives_reasoning: bool,
        text_tools: frozenset[str] = frozenset(),
    ) -> None:
        self._index = index
        self._choice = choice
        self._tokenizer = tokenizer
        self._is_streamed = envelope is not None
        self._is_plain = self._is_streamed and choice.received.logprobs is None
        self._gives_reasoning = gives_reasoning
        self._texts: dict[type, list[str]] = {ReasoningDelta: [], TextDelta: []}
        self._logprobs: list[ContentLogprob] = []
        self._text_tools = text_tools
        self._calls: list[ToolCallBody | CustomCallBody] = []
        self._arguments: list[list[str]] = []
        self._open: type[Delta] | None = None
        head = b"" if envelope is None else envelope.head
        self._head = head + b'{"index":%d,"delta":' % index
        self._tail = b"" if envelope is None else envelope.tail
        self._text_head = self._head + b'{"content":'
        self._reasoning_head = self._head + b'{"reasoning":'
        self._plain_tail = b"}" + _NO_LOGPROBS + self._tail

    def role(self) -> bytes:
        """The first chunk, with the role."""
        return self._head + b'{"role":"assistant","content":""' + self._plain_tail

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The chunks of these deltas."""
        if len(deltas) != 1:
            return b"".join([self._delta(delta) for delta in deltas])
        delta = deltas[0]
        if self._is_plain and self._open is type(delta):  # the hot path
            if type(delta) is TextDelta:
                return b"".join((self._text_head, _encode(delta.text), self._plain_tail))
            if type(delta) is ReasoningDelta:
                return self._reasoning_chunk(_encode(delta.text))
        return self._delta(delta)

    def end(self) -> bytes:
        """The last chunk of the choice."""
        reason = self._choice.finish_reason.encode()
        last = self._head + b'{},"logprobs":null,"finish_reason":"%b"}' % reason + self._tail
        return last if self._is_streamed else b""

    def body(self) -> ChatChoiceBody:
        """The choice so far, unless streamed; `content` is null if there are calls and no visible text."""
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            if isinstance(call, CustomCallBody):
                call.custom.input = "".join(arguments)
            else:
                call.function.arguments = "".join(arguments)
        reasoning = "".join(self._texts[ReasoningDelta]) or UNSET
        text = "".join(self._texts[TextDelta])
        has_logprobs = bool(text) and self._choice.received.logprobs is not None
        return ChatChoiceBody(
            index=self._index,
            message=ChatMessage(
                content=text if text or not self._calls else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=self._calls or UNSET,
            ),
            finish_reason=self._choice.finish_reason,
            logprobs=ChatLogprobs(content=self._logprobs) if has_logprobs else None,
        )

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                return self._text(delta)
            case ReasoningDelta():
                return self._reasoning(delta) if self._gives_reasoning else b""
            case ToolCallArguments():
                return self._more_arguments(delta)
            case ToolCallStart():
                return self._call(delta)
            case MessageEnd():
                self._open = None
                return b""

    def _text(self, delta: TextDelta) -> bytes:
        text = self._added(delta)
        entries = self._choice.logprobs_of(delta)
        if entries is not None:
            return self._text_with(content_logprobs(entries, self._tokenizer), text)
        return b"".join((self._text_head, _encode(text), self._plain_tail)) if self._is_streamed else b""

    def _text_with(self, logprobs: list[ContentLogprob], text: str) -> bytes:
        self._logprobs += logprobs
        data = _encode(ChatLogprobs(content=logprobs))
        rest = b'},"logprobs":' + data + b',"finish_reason":null}' + self._tail
        return self._text_head + _encode(text) + rest if self._is_streamed else b""

    def _reasoning(self, delta: ReasoningDelta) -> bytes:
        data = _encode(self._added(delta))
        return self._reasoning_chunk(data) if self._is_streamed else b""

    def _reasoning_chunk(self, data: bytes) -> bytes:
        """More reasoning text, under both field names that clients read."""
        return b"".join((self._reasoning_head, data, b',"reasoning_content":', data, self._plain_tail))

    def _added(self, delta: TextDelta | ReasoningDelta) -> str:
        """The delta's text, after a paragraph break if it starts another message of its kind."""
        kind = type(delta)
        texts = self._texts[kind]
        text = delta.text if self._open is kind or not texts else PARAGRAPH + delta.text
        self._open = kind
        texts.append(text)
        return text

    def _call(self, delta: ToolCallStart) -> bytes:
        """The first chunk of a call: id, type and name."""
        call: ToolCallBody | CustomCallBody
        if delta.name in self._text_tools:
            call = CustomCallBody(id=delta.call_id, custom=CustomCall(name=delta.name, input=""))
        else:
            call = ToolCallBody(id=delta.call_id, function=FunctionCall(name=delta.name, arguments=""))
        self._calls.append(call)
        self._arguments.append([])
        # Inserts the index as the object's first field.
        return self._chunk_of_calls(b'{"index":%d,' % delta.index + _encode(call)[1:])

    def _more_arguments(self, delta: ToolCallArguments) -> bytes:
        self._arguments[delta.index].append(delta.text)
        text = _encode(delta.text)
        if isinstance(self._calls[delta.index], CustomCallBody):
            return self._chunk_of_calls(b'{"index":%d,"custom":{"input":%b}}' % (delta.index, text))
        return self._chunk_of_calls(b'{"index":%d,"function":{"arguments":%b}}' % (delta.index, text))

    def _chunk_of_calls(self, call: bytes) -> bytes:
        chunk = (self._head, b'{"tool_calls":[', call, b"]", self._plain_tail)
        return b"".join(chunk) if self._is_streamed else b""
