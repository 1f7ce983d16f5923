"""A chat completion: from the body to the answer, as chunks or whole."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from baton.messages import TokenChunk
from frontend.chat.request import ChatBody, CustomCall, FunctionCall, MessageToolCall, turn_request
from frontend.harmony.conversation import Begin, Delta, Text
from frontend.http.answer import (
    ChoiceWriter,
    ChunkedAnswer,
    ContentLogprob,
    Envelope,
    UsageBody,
    content_logprobs,
)
from frontend.http.body import read
from frontend.http.respond import Operations, Services, generating
from frontend.turn.choice import Choice, FinishReason
from frontend.turn.request import Client
from frontend.turn.thoughts import PARAGRAPH


async def prepare_chat(raw: bytes, client: Client, services: Services) -> ChunkedAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    body, unknown, (request, inexact) = await read(raw, ChatBody, turn_request)
    choices = await services.prepare(request, client)
    return ChunkedAnswer(
        Envelope("chat.completion.chunk", "chatcmpl", choices[0].request.model, body),
        choices,
        MessageWriter,
        ChatCompletion,
        (*unknown, *inexact),
    )


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
        prepare_chat,
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

    def feed(self, chunk: TokenChunk) -> bytes:
        return self.write(self.choice.feed(chunk))

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
        if start.name in self.choice.text_tools:
            custom = CustomCall(name=start.name, input=text)
            return MessageToolCall(id=start.call_id, type="custom", custom=custom)
        function = FunctionCall(name=start.name, arguments=text)
        return MessageToolCall(id=start.call_id, type="function", function=function)
