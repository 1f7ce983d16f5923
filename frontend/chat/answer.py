"""A chat completion: from the body to the answer, as chunks or whole."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from frontend.chat.request import (
    ChatBody,
    CustomCall,
    FunctionCall,
    gives_reasoning,
    not_enforced,
    turn_request,
)
from frontend.harmony.conversation import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.http.body import decode, read
from frontend.http.chunks import ChunkedAnswer, ContentLogprob, Envelope, UsageBody, content_logprobs
from frontend.http.services import Services
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice, FinishReason
from frontend.turn.request import Client, TurnRequest
from frontend.turn.thoughts import PARAGRAPH


async def prepare_chat(raw: bytes, client: Client, services: Services) -> ChunkedAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    body, unknown, request = await read(raw, _read)
    served, choices = await services.prepare(request, client)
    envelope = Envelope("chat.completion.chunk", "chatcmpl", served.name, has_usage=body.gives_usage)
    text_tools = frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None)
    writers = [
        MessageWriter(
            index,
            choice,
            served.tokenizer,
            envelope,
            gives_reasoning=gives_reasoning(body),
            text_tools=text_tools,
        )
        for index, choice in enumerate(choices)
    ]
    metadata = UNSET if body.metadata is None else body.metadata
    return ChunkedAnswer(
        envelope,
        choices,
        writers,
        partial(ChatCompletion, metadata=metadata),
        stream=bool(body.stream),
        ignored=(*unknown, *not_enforced(body)),
    )


def _read(raw: bytes) -> tuple[ChatBody, tuple[str, ...], TurnRequest]:
    body, unknown = decode(raw, ChatBody)
    return body, unknown, turn_request(body, len(raw))


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of the visible text."""

    content: list[ContentLogprob]
    refusal: None = None


class ToolCallBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call that the model requests; it has the field that `type` names."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer. `reasoning` and `reasoning_content` are the same text, under both names that clients
    read."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


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
_MORE_ARGUMENTS = b'{"index":%d,"function":{"arguments":%b}}'
_MORE_INPUT = b'{"index":%d,"custom":{"input":%b}}'
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


class MessageWriter:
    """Builds the message of one choice. Calls of `text_tools` are output as custom tool calls."""

    def __init__(
        self,
        index: int,
        choice: Choice,
        tokenizer: ModelTokenizer,
        envelope: Envelope,
        *,
        gives_reasoning: bool,
        text_tools: frozenset[str] = frozenset(),
    ) -> None:
        self._index = index
        self._choice = choice
        self._tokenizer = tokenizer
        self._gives_reasoning = gives_reasoning
        self._text_tools = text_tools
        self._calls: list[ToolCallBody] = []
        self._open: type[Delta] | None = None
        self._begun: set[type[Delta]] = set()
        self._head = envelope.head + b'{"index":%d,"delta":' % index
        self._tail = envelope.tail
        self._text_head = self._head + b'{"content":'
        self._reasoning_head = self._head + b'{"reasoning":'
        self._plain_tail = b"}" + _NO_LOGPROBS + self._tail

    def opening(self) -> bytes:
        """The first chunk, with the role."""
        return self._head + b'{"role":"assistant","content":""' + self._plain_tail

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The chunks of these deltas."""
        chunks: list[bytes] = []
        for delta in deltas:
            match delta:
                case TextDelta():
                    text = _encode(delta.text if self._open is TextDelta else self._separated(delta))
                    tail = self._plain_tail if self._choice.logprobs is None else self._scored_tail(delta)
                    chunks += (self._text_head, text, tail)
                case ReasoningDelta() if self._gives_reasoning:
                    text = _encode(delta.text if self._open is ReasoningDelta else self._separated(delta))
                    # Under both field names that clients read.
                    chunks += (self._reasoning_head, text, b',"reasoning_content":', text, self._plain_tail)
                case ToolCallStart():
                    # Inserts the index as the object's first field.
                    call = b'{"index":%d,' % delta.index + _encode(self._begin_call(delta))[1:]
                    chunks += (self._head, b'{"tool_calls":[', call, b"]", self._plain_tail)
                case ToolCallArguments():
                    shape = _MORE_ARGUMENTS if self._calls[delta.index].custom is None else _MORE_INPUT
                    call = shape % (delta.index, _encode(delta.text))
                    chunks += (self._head, b'{"tool_calls":[', call, b"]", self._plain_tail)
                case MessageEnd():
                    self._open = None
        return b"".join(chunks)

    def end(self) -> bytes:
        """The last chunk of the choice."""
        reason = self._choice.finish_reason.encode()
        return self._head + b'{},"logprobs":null,"finish_reason":"%b"}' % reason + self._tail

    def body(self, deltas: Sequence[Delta]) -> ChatChoiceBody:
        """The whole choice; `content` is null if there are calls and no visible text."""
        # Joined at the end: each `+=` would copy all that came before.
        texts: dict[type[Delta], list[str]] = {TextDelta: [], ReasoningDelta: []}
        written: list[list[str]] = []  # by the calls
        logprobs: list[ContentLogprob] = []
        for delta in deltas:
            match delta:
                case TextDelta():
                    texts[TextDelta].append(self._separated(delta))
                    logprobs += self._logprobs(delta)
                case ReasoningDelta() if self._gives_reasoning:
                    texts[ReasoningDelta].append(self._separated(delta))
                case ToolCallStart():
                    self._begin_call(delta)
                    written.append([])
                case ToolCallArguments():
                    written[delta.index].append(delta.text)
                case MessageEnd():
                    self._open = None
        for call, parts in zip(self._calls, written, strict=True):
            if call.custom is not None:
                call.custom.input = "".join(parts)
            elif call.function is not None:
                call.function.arguments = "".join(parts)
        text, reasoning = "".join(texts[TextDelta]), "".join(texts[ReasoningDelta]) or UNSET
        has_logprobs = bool(text) and self._choice.logprobs is not None
        return ChatChoiceBody(
            index=self._index,
            message=ChatMessage(
                content=text if text or not self._calls else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=self._calls or UNSET,
            ),
            finish_reason=self._choice.finish_reason,
            logprobs=ChatLogprobs(content=logprobs) if has_logprobs else None,
        )

    def _scored_tail(self, delta: TextDelta) -> bytes:
        logprobs = _encode(ChatLogprobs(content=self._logprobs(delta)))
        return b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self._tail

    def _begin_call(self, delta: ToolCallStart) -> ToolCallBody:
        if delta.name in self._text_tools:
            custom = CustomCall(name=delta.name, input="")
            call = ToolCallBody(id=delta.call_id, type="custom", custom=custom)
        else:
            function = FunctionCall(name=delta.name, arguments="")
            call = ToolCallBody(id=delta.call_id, type="function", function=function)
        self._calls.append(call)
        return call

    def _separated(self, delta: TextDelta | ReasoningDelta) -> str:
        """The delta's text, after a paragraph break if it starts another message of its kind."""
        kind = type(delta)
        text = PARAGRAPH + delta.text if kind in self._begun and self._open is not kind else delta.text
        self._open = kind
        self._begun.add(kind)
        return text

    def _logprobs(self, delta: TextDelta) -> list[ContentLogprob]:
        return content_logprobs(self._choice.logprobs_of(delta) or (), self._tokenizer)
