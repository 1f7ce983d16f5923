"""A Messages answer: from the body to content blocks and their events, or a token count."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec

from baton.errors import BatonError
from frontend.harmony.parse import Begin, Delta, End, Text
from frontend.http.answer import Answer
from frontend.http.exchange import MessagesError
from frontend.http.respond import Asked, Operations, Services, counting, generating, read
from frontend.messages.request import Counted, MessagesBody, turn_request
from frontend.turn.choice import Choice
from frontend.turn.ids import new_id
from frontend.turn.request import Client
from frontend.turn.thoughts import Seal

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Visible text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning text and its signature, which must be sent back unchanged."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call that the model requests."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. `input_tokens` excludes cached tokens; the end of a stream has no `service_tier`."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    service_tier: Literal["standard"] | msgspec.UnsetType = "standard"


class MessageObject(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/messages`, unless streamed."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: Usage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct, kw_only=True):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_encode = msgspec.json.Encoder().encode
# The type of a block's deltas, and their field.
_DELTA_OF = {
    TextBlock: (b"text_delta", b"text"),
    ThinkingBlock: (b"thinking_delta", b"thinking"),
    ToolUseBlock: (b"input_json_delta", b"partial_json"),
}


async def ask(body_type: type[Counted], raw: bytes, _: Client, services: Services) -> Asked[Answer]:
    """See `frontend.http.respond.Ask`. A body that is only counted gets no answer."""
    making = partial(turn_request, seal=services.seal)
    body, unknown, (request, left_out) = await read(raw, body_type, making)
    answer = partial(MessagesAnswer, cast("MessagesBody", body), services.seal)
    return Asked(request, (*unknown, *left_out), answer)


_HELLO = {"messages": [{"role": "user", "content": "Hello there!"}]}
OPERATIONS: Operations = {
    ("POST", "/v1/messages"): generating(
        partial(ask, MessagesBody),
        "Create a message",
        MessageObject,
        MessagesBody,
        {"max_tokens": 100, **_HELLO},
    ),
    ("POST", "/v1/messages/count_tokens"): counting(
        partial(ask, Counted), "Count a message's input tokens", TokenCount, Counted, _HELLO
    ),
}


class MessagesAnswer(Answer):
    """The answer to one Messages body. Each message is a content block; `seal` signs thinking blocks."""

    keep_alive = PING

    def __init__(self, body: MessagesBody, seal: Seal, choices: Sequence[Choice]) -> None:
        thinking = body.thinking
        self.stream = bool(body.stream)
        self.choices = choices
        (self.choice,) = choices
        self._seal = seal
        self._shows_thinking = (
            thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"
        )
        self._max_tokens = body.max_tokens
        self._message = MessageObject(id=new_id("msg"), model=body.model, content=[], usage=self._usage())
        self._texts: list[str] = []  # of the open block
        self._open: AnswerBlock | None = None
        self._delta_head = b""
        # Encoded now, while the message has no content.
        self._opening = self._event("message_start", message=self._message) + PING

    def opening(self) -> bytes:
        """`message_start`, with the usage known so far, and a ping, as in Anthropic's streams."""
        return self._opening

    def finish(self) -> bytes:
        """The last events, with the end of a block that is still open."""
        return super().finish() + self._end_block()

    def closing(self) -> bytes:
        """`message_delta` with the stop reason and the usage, and `message_stop`."""
        message = self.body()
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        usage = msgspec.structs.replace(message.usage, service_tier=msgspec.UNSET)
        last = self._event("message_delta", delta=delta, usage=usage)
        return last + self._event("message_stop")

    def failure(self, error: BatonError) -> bytes:
        return b"event: error\ndata: " + _encode(MessagesError.of(error)) + b"\n\n"

    def body(self) -> MessageObject:
        choice, message = self.choice, self._message
        message.usage = self._usage()
        message.stop_reason = "tool_use" if choice.finish_reason == "tool_calls" else "end_turn"
        if choice.is_cut:
            is_full = choice.request.sampling.max_tokens < self._max_tokens
            message.stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif choice.stop_string is not None and not choice.call_ids:
            message.stop_reason, message.stop_sequence = "stop_sequence", choice.stop_string
        return message

    def write_one(self, delta: Delta) -> bytes:
        match delta:
            case Text():
                if self._open is None:  # reasoning that is not shown
                    return b""
                self._texts.append(delta.text)
                return b"".join((self._delta_head, _encode(delta.text), b"}}\n\n")) if self.stream else b""
            case Begin("call", name, _, call_id):
                return self._begin(ToolUseBlock(id=call_id, name=name))
            case Begin("thought"):
                return self._begin(ThinkingBlock()) if self._shows_thinking else b""
            case Begin():
                return self._begin(TextBlock())
            case End():
                return self._end_block()

    def _begin(self, block: AnswerBlock) -> bytes:
        index = len(self._message.content)
        self._message.content.append(block)
        self._open = block
        self._texts = []
        self._delta_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (index, *_DELTA_OF[type(block)])
        )
        return self._event("content_block_start", index=index, content_block=block)

    def _end_block(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        text = "".join(self._texts)
        index = len(self._message.content) - 1
        signed = b""
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, self._seal.sign(text)
                delta = {"type": "signature_delta", "signature": block.signature}
                signed = self._event("content_block_delta", index=index, delta=delta)
            case ToolUseBlock():
                block.input = _object(text)
        return signed + self._event("content_block_stop", index=index)

    def _usage(self) -> Usage:
        choice, num_prompt = self.choice, len(self.choice.request.token_ids)
        return Usage(
            input_tokens=num_prompt - choice.num_cached_tokens,
            cache_read_input_tokens=choice.num_cached_tokens,
            output_tokens=choice.num_tokens,
        )

    def _event(self, kind: str, **fields: object) -> bytes:
        if not self.stream:
            return b""
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _object(text: str) -> dict[str, object]:
    """A call's input, which must be an object in this API; malformed JSON is wrapped in one."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}
