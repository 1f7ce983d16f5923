"""Where a chat choice's deltas go: SSE chunks made from prepared bytes, or one message."""

import secrets

import msgspec
from msgspec import UNSET

from frontend.answers import (
    ChatChoiceBody,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    ContentLogprob,
    FunctionCall,
    ToolCallBody,
)

_encode = msgspec.json.Encoder().encode
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


def new_call_id() -> str:
    """An id that no other call of the conversation has."""
    return f"call_{secrets.token_hex(16)}"


class StreamedMessage:
    """SSE chunks. `head` is everything before a chunk's delta, `tail` everything after its choice."""

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head = head
        self._tail = tail
        self._text_head = head + b'{"content":'
        self._reasoning_head = head + b'{"reasoning":'
        self._plain_tail = b"}" + _NO_LOGPROBS + tail

    def role(self) -> bytes:
        """Who speaks."""
        return self._head + b'{"role":"assistant","content":""' + self._plain_tail

    def reasoning(self, text: str) -> bytes:
        """More of the chain of thought, under the names of two clients."""
        data = _encode(text)
        return b"".join((self._reasoning_head, data, b',"reasoning_content":', data, self._plain_tail))

    def text(self, text: str, logprobs: list[ContentLogprob] | None) -> bytes:
        """More visible text."""
        if logprobs is None:
            return b"".join((self._text_head, _encode(text), self._plain_tail))
        data = _encode(ChatLogprobs(content=logprobs))
        rest = b'},"logprobs":' + data + b',"finish_reason":null}' + self._tail
        return self._text_head + _encode(text) + rest

    def call(self, index: int, name: str) -> bytes:
        """A call begins: its id, type and name, once."""
        call = ToolCallBody(id=new_call_id(), function=FunctionCall(name=name, arguments=""))
        # The index stands first in the same object.
        return self._calls(b'{"index":%d,' % index + _encode(call)[1:])

    def arguments(self, index: int, text: str) -> bytes:
        """More argument text of a call."""
        return self._calls(b'{"index":%d,"function":{"arguments":%b}}' % (index, _encode(text)))

    def end(self, finish_reason: ChatFinish) -> bytes:
        """The last chunk of the choice."""
        return self._head + b'{},"logprobs":null,"finish_reason":"%b"}' % finish_reason.encode() + self._tail

    def _calls(self, call: bytes) -> bytes:
        return b"".join((self._head, b'{"tool_calls":[', call, b"]", self._plain_tail))


class WholeMessage:
    """One message, gathered; adds no bytes to any stream."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._logprobs: list[ContentLogprob] | None = None
        self._calls: list[tuple[str, list[str]]] = []
        self._finish_reason: ChatFinish = "stop"

    def reasoning(self, text: str) -> bytes:
        """More of the chain of thought."""
        self._reasoning.append(text)
        return b""

    def text(self, text: str, logprobs: list[ContentLogprob] | None) -> bytes:
        """More visible text."""
        self._text.append(text)
        if logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *logprobs]
        return b""

    def call(self, index: int, name: str) -> bytes:  # noqa: ARG002 calls come in order
        """A call begins."""
        self._calls.append((name, []))
        return b""

    def arguments(self, index: int, text: str) -> bytes:
        """More argument text of a call."""
        self._calls[index][1].append(text)
        return b""

    def end(self, finish_reason: ChatFinish) -> bytes:
        """The choice is complete."""
        self._finish_reason = finish_reason
        return b""

    def body(self, index: int) -> ChatChoiceBody:
        """The choice as it stands in the answer; `content` is null if there was no visible text but calls."""
        reasoning = "".join(self._reasoning) or UNSET
        text = "".join(self._text)
        calls = [
            ToolCallBody(id=new_call_id(), function=FunctionCall(name=name, arguments="".join(arguments)))
            for name, arguments in self._calls
        ]
        return ChatChoiceBody(
            index=index,
            message=ChatMessage(
                content=text if text or not calls else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            ),
            finish_reason=self._finish_reason,
            logprobs=None if self._logprobs is None else ChatLogprobs(content=self._logprobs),
        )
