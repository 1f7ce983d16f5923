"""The events of a response's stream as bytes, numbered without gaps, and the item that is being written."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from frontend.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    WrittenItem,
)
from frontend.turn.logprobs import ContentLogprob

_encode = msgspec.json.Encoder().encode


class EventTopLogprob(msgspec.Struct):
    """One of the likeliest tokens."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """A token of the visible text as OpenAI's events show it: without the bytes that the item has."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class EventWriter:
    """Makes events; each has the number after the last one's."""

    def __init__(self) -> None:
        self.num_events = 0

    def event(self, kind: str, **fields: object) -> bytes:
        """One event of these fields."""
        return self.numbered(head(kind, **fields))

    def numbered(self, data: bytes) -> bytes:
        """An event's bytes up to its number, as a whole event."""
        number = self.num_events
        self.num_events += 1
        return b'%b,"sequence_number":%d}\n\n' % (data, number)


def head(kind: str, **fields: object) -> bytes:
    """An event up to where more fields can follow."""
    return b"event: %b\ndata: " % kind.encode() + _encode({"type": kind, **fields})[:-1]


def after(stream: bytes, sequence_number: int) -> bytes:
    """The events of a whole stream that come after the one of this number; -1: all of them."""
    events = stream.split(b"\n\n")  # JSON has no line break of its own
    return b"\n\n".join(events[sequence_number + 1 :])


class _Shape(NamedTuple):
    """The events of an item's text, of the part that has it, and the field that numbers its parts."""

    text: str
    part: str | None = None
    counter: str | None = None


_THOUGHT = _Shape("response.reasoning_text", "response.content_part", "content_index")
_SUMMARY = _Shape("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index")
_TEXT = _Shape("response.output_text", "response.content_part", "content_index")
_CALL = _Shape("response.function_call_arguments")
_CUSTOM_CALL = _Shape("response.custom_tool_call_input")


class OpenItem:
    """An output item while it is being written. Its methods give the events, or b"" without a `writer`."""

    def __init__(
        self, item: WrittenItem, index: int, writer: EventWriter | None, *, as_summary: bool = False
    ) -> None:
        self.item = item
        self._writer = writer
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._shape = _SUMMARY if as_summary else _shape_of(item)
        self._place: dict[str, object] = {"item_id": item.id, "output_index": index}
        if self._shape.counter is not None:
            self._place[self._shape.counter] = 0
        self._delta_head = head(self._shape.text + ".delta", **self._place) + b',"delta":'
        self._delta_tail = b',"logprobs":[]' if isinstance(item, MessageItem) else b""

    def begin(self) -> bytes:
        """The item is there, and its one part."""
        index = self._place["output_index"]
        added = self._event("response.output_item.added", output_index=index, item=self.item)
        if self._shape.part is None:
            return added
        return added + self._event(self._shape.part + ".added", **self._place, part=self._part(""))

    def write(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> bytes:
        """More of its text."""
        self._texts.append(text)
        tail = self._delta_tail
        if logprobs:
            self._logprobs += logprobs
            tail = b',"logprobs":' + _encode(_without_bytes(logprobs))
        if self._writer is None:
            return b""
        return self._writer.numbered(b"".join((self._delta_head, _encode(text), tail)))

    def fill(self) -> str:
        """Put the text so far into the item; gives it."""
        text = "".join(self._texts)
        match self.item:
            case FunctionCallItem() as call:
                call.arguments = text
            case CustomCallItem() as call:
                call.input = text
            case MessageItem() as message:
                message.content = [OutputText(text=text, logprobs=list(self._logprobs))]
            case ReasoningItem() as reasoning if self._shape is _SUMMARY:
                reasoning.summary = [SummaryText(text=text)]
            case ReasoningItem() as reasoning:
                reasoning.content = [ReasoningText(text=text)]
        return text

    def end(self, status: ItemStatus) -> bytes:
        """The item is as it will stay."""
        self.item.status = status
        ended = self._ended(self.fill())
        index = self._place["output_index"]
        return ended + self._event("response.output_item.done", output_index=index, item=self.item)

    def _ended(self, text: str) -> bytes:
        kind = self._shape.text + ".done"
        match self.item:
            case FunctionCallItem(name=name):
                return self._event(kind, **self._place, name=name, arguments=text)
            case CustomCallItem():
                return self._event(kind, **self._place, input=text)
            case MessageItem():
                logprobs = _without_bytes(self._logprobs)
                done = self._event(kind, **self._place, text=text, logprobs=logprobs)
            case ReasoningItem():
                done = self._event(kind, **self._place, text=text)
        return done + self._event(f"{self._shape.part}.done", **self._place, part=self._part(text))

    def _part(self, text: str) -> OutputText | ReasoningText | SummaryText:
        if not isinstance(self.item, ReasoningItem):
            return OutputText(text=text, logprobs=list(self._logprobs))
        return SummaryText(text=text) if self._shape is _SUMMARY else ReasoningText(text=text)

    def _event(self, kind: str, **fields: object) -> bytes:
        return b"" if self._writer is None else self._writer.event(kind, **fields)


def _shape_of(item: WrittenItem) -> _Shape:
    match item:
        case ReasoningItem():
            return _THOUGHT
        case MessageItem():
            return _TEXT
        case FunctionCallItem():
            return _CALL
        case CustomCallItem():
            return _CUSTOM_CALL


def _without_bytes(logprobs: Sequence[ContentLogprob]) -> list[EventLogprob]:
    return msgspec.convert(logprobs, list[EventLogprob], from_attributes=True)
