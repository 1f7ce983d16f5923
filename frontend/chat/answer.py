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
from frontend.http.services import Services
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice, FinishReason
from frontend.turn.request import Client
from frontend.turn.thoughts import PARAGRAPH


async def prepare_chat(raw: bytes, client: Client, services: Services) -> ChunkedAnswer:
    """The answer to a body, ready to be generated. Raises a BatonError if the body is refused."""
    body, unknown, request = await read(raw, ChatBody, turn_request)
    served, choices = await services.prepare(request, client)
    writer = partial(
        MessageWriter,
        tokenizer=served.tokenizer,
        gives_reasoning=gives_reasoning(body),
        text_tools=frozenset(tool.custom.name for tool in body.tools or () if tool.custom is not None),
    )
    return ChunkedAnswer(
        Envelope("chat.completion.chunk", "chatcmpl", served.name, body),
        choices,
        writer,
        partial(ChatCompletion, metadata=UNSET if body.metadata is None else body.metadata),
        (*unknown, *not_enforced(body)),
    )


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
    """The answer. `reasoning` and `reasoning_content` are the same text: clients read either."""

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
_MORE_ARGUMENTS = b'{"index":%d,"function":{"arguments":%%b}}'
_MORE_INPUT = b'{"index":%d,"custom":{"input":%%b}}'
_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null}'


class MessageWriter(ChoiceWriter):
    """Builds the message of one choice. Calls of `text_tools` are output as custom tool calls."""

    def __init__(
        self,
        index: int,
        choice: Choice,
        envelope: Envelope,
        *,
        tokenizer: ModelTokenizer,
        gives_reasoning: bool,
        text_tools: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(index, choice, envelope)
        self._tokenizer = tokenizer
        self._gives_reasoning = gives_reasoning
        self._text_tools = text_tools
        self._kind = ""  # of the open message; a preamble is a text
        self._begun: set[str] = set()
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
                    text, self._separator = _encode(self._separator + delta.text), ""
                    if self._kind == "text":
                        tail = self._plain_tail if self.choice.logprobs is None else self._scored_tail(delta)
                        chunks += self._text_head, text, tail
                    elif self._kind == "call":
                        chunks += self._head, b'{"tool_calls":[', self._more % text, b"]", self._plain_tail
                    elif self._gives_reasoning:  # under both field names that clients read
                        chunks += self._reasoning_head, text, b',"reasoning_content":', text, self._plain_tail
                case Begin("call"):
                    self._kind, call = "call", self._call(delta)
                    self._more = (_MORE_ARGUMENTS if call.custom is None else _MORE_INPUT) % delta.index
                    # Inserts the index as the object's first field.
                    begun = b'{"index":%d,' % delta.index + _encode(call)[1:]
                    chunks += (self._head, b'{"tool_calls":[', begun, b"]", self._plain_tail)
                case Begin(kind):
                    self._kind = "thought" if kind == "thought" else "text"
                    self._separator = PARAGRAPH if self._kind in self._begun else ""
                    self._begun.add(self._kind)
        return b"".join(chunks)

    def end(self) -> bytes:
        reason = self.choice.finish_reason.encode()
        return self._head + b'{},"logprobs":null,"finish_reason":"%b"}' % reason + self.tail

    def body(self, deltas: Sequence[Delta]) -> ChatChoiceBody:
        """The whole choice; `content` is null if there are calls and no visible text."""
        # Joined at the end: each `+=` would copy all that came before.
        texts: list[str] = []
        reasonings: list[str] = []
        calls: list[tuple[Begin, list[str]]] = []
        logprobs: list[ContentLogprob] = []
        parts = texts
        for delta in deltas:
            match delta:
                case Begin("call"):
                    parts = []
                    calls.append((delta, parts))
                case Begin(kind):
                    parts = reasonings if kind == "thought" else texts
                    if parts:
                        parts.append(PARAGRAPH)
                case Text(text):
                    parts.append(text)
                    if parts is texts and self.choice.logprobs is not None:
                        logprobs += self._logprobs(delta)
        text, reasoning = "".join(texts), ("".join(reasonings) if self._gives_reasoning else "") or UNSET
        has_logprobs = bool(text) and self.choice.logprobs is not None
        return ChatChoiceBody(
            index=self.index,
            message=ChatMessage(
                content=text if text or not calls else None,
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=[self._call(start, "".join(parts)) for start, parts in calls] or UNSET,
            ),
            finish_reason=self.choice.finish_reason,
            logprobs=ChatLogprobs(content=logprobs) if has_logprobs else None,
        )

    def _scored_tail(self, delta: Text) -> bytes:
        logprobs = _encode(ChatLogprobs(content=self._logprobs(delta)))
        return b'},"logprobs":' + logprobs + b',"finish_reason":null}' + self.tail

    def _call(self, start: Begin, text: str = "") -> ToolCallBody:
        if start.name in self._text_tools:
            custom = CustomCall(name=start.name, input=text)
            return ToolCallBody(id=start.call_id, type="custom", custom=custom)
        function = FunctionCall(name=start.name, arguments=text)
        return ToolCallBody(id=start.call_id, type="function", function=function)

    def _logprobs(self, delta: Text) -> list[ContentLogprob]:
        return content_logprobs(self.choice.logprobs_of(delta) or (), self._tokenizer)
