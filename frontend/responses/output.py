"""The output of a response: turns a choice's deltas into output items and events."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from frontend.harmony.conversation import (
    FUNCTIONS,
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    Phase,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    WrittenItem,
    machine_call,
)
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice
from frontend.turn.ids import new_id
from frontend.turn.logprobs import ContentLogprob, content_logprobs
from frontend.turn.seal import Seal

_encode = msgspec.json.Encoder().encode


class EventTopLogprob(msgspec.Struct):
    """One of the most likely tokens."""

    token: str
    logprob: float


class EventLogprob(msgspec.Struct):
    """A token of the visible text in OpenAI's event format, which has no `bytes`."""

    token: str
    logprob: float
    top_logprobs: list[EventTopLogprob]


class EventWriter:
    """Encodes events with consecutive sequence numbers."""

    def __init__(self) -> None:
        self.num_events = 0

    def event(self, kind: str, **fields: object) -> bytes:
        """One event with these fields."""
        return self.numbered(head(kind, **fields))

    def numbered(self, data: bytes) -> bytes:
        """Complete an event from `head` with its sequence number."""
        number = self.num_events
        self.num_events += 1
        return b'%b,"sequence_number":%d}\n\n' % (data, number)


def head(kind: str, **fields: object) -> bytes:
    """An event that is still open for more fields."""
    return b"event: %b\ndata: " % kind.encode() + _encode({"type": kind, **fields})[:-1]


def after(stream: bytes, sequence_number: int) -> bytes:
    """The events of a stream after the one with this sequence number; -1 means all."""
    parts = stream.split(b"\n\n", sequence_number + 1)  # encoded JSON has no line breaks
    return parts[-1] if len(parts) > sequence_number + 1 else b""


class _Shape(NamedTuple):
    """Event names of an item's text and of its part, and the field with the part's index."""

    text: str
    part: str | None = None
    counter: str | None = None


_THOUGHT = _Shape("response.reasoning_text", "response.content_part", "content_index")
_SUMMARY = _Shape("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index")
_TEXT = _Shape("response.output_text", "response.content_part", "content_index")
_CALL = _Shape("response.function_call_arguments")
_CUSTOM_CALL = _Shape("response.custom_tool_call_input")


class OpenItem:
    """An output item that is being written. Its methods return events, or b"" without a `writer`."""

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
        """The events that add the item and its single part."""
        index = self._place["output_index"]
        added = self._event("response.output_item.added", output_index=index, item=self.item)
        if self._shape.part is None:
            return added
        return added + self._event(self._shape.part + ".added", **self._place, part=self._part(""))

    def write(self, text: str, logprobs: Sequence[ContentLogprob] = ()) -> bytes:
        """The event that adds text."""
        self._texts.append(text)
        tail = self._delta_tail
        if logprobs:
            self._logprobs += logprobs
            tail = b',"logprobs":' + _encode(_without_bytes(logprobs))
        if self._writer is None:
            return b""
        return self._writer.numbered(b"".join((self._delta_head, _encode(text), tail)))

    def fill(self) -> str:
        """Store the text so far in the item; returns the text."""
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
        """The events that complete the item."""
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


class OutputShape(msgspec.Struct, frozen=True, kw_only=True):
    """How the output is formatted: `tools` by called name; calls of `machine_tools` become items of the
    tool's type. `as_summary` outputs reasoning as summaries, `seal` fills `encrypted_content`. `keep` gets
    each reasoning item's id and text."""

    tools: Mapping[str, Tool]
    keep: Callable[[str, str], None]
    machine_tools: frozenset[str] = frozenset()
    as_summary: bool = False
    seal: Seal | None = None


class OutputWriter:
    """Builds the items, one per Harmony message; without a `writer` it produces no events."""

    def __init__(
        self, choice: Choice, tokenizer: ModelTokenizer, shape: OutputShape, writer: EventWriter | None
    ) -> None:
        self.items: list[OutputItem] = []
        self._choice = choice
        self._tokenizer = tokenizer
        self._shape = shape
        self._writer = writer
        self._open: OpenItem | None = None
        self._machine_call: ToolCallStart | None = None
        self._machine_arguments: list[str] = []

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        if len(deltas) == 1:  # the hot path
            return self._delta(deltas[0])
        return b"".join([self._delta(delta) for delta in deltas])

    def fill(self) -> None:
        """Store the text so far in the open item."""
        if self._open is not None:
            self._open.fill()

    def interrupt(self) -> None:
        """Leave the open item incomplete."""
        if self._open is not None:
            self._open.fill()
            self._open.item.status = "incomplete"
            self._open = None

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                opening, item = self._message(delta)
                return opening + item.write(delta.text, self._logprobs_of(delta))
            case ReasoningDelta():
                opening, item = self._reasoning()
                return opening + item.write(delta.text)
            case ToolCallArguments():
                return self._arguments(delta.text)
            case ToolCallStart():
                return self._begin_call(delta)
            case MessageEnd():
                return self._end(delta)

    def _message(self, delta: TextDelta) -> tuple[bytes, OpenItem]:
        if self._open is not None:
            return b"", self._open
        phase: Phase = "commentary" if delta.preamble else "final_answer"
        return self._begin(
            MessageItem(id=new_id("msg"), role="assistant", status="in_progress", content=[], phase=phase)
        )

    def _reasoning(self) -> tuple[bytes, OpenItem]:
        if self._open is not None:
            return b"", self._open
        return self._begin(ReasoningItem(id=new_id("rs"), status="in_progress"))

    def _begin_call(self, delta: ToolCallStart) -> bytes:
        if delta.name in self._shape.machine_tools:
            self._machine_call, self._machine_arguments = delta, []
            return b""
        tool = self._shape.tools.get(delta.name, Tool(name=delta.name))
        namespace = UNSET if tool.namespace == FUNCTIONS else tool.namespace
        item: WrittenItem
        if tool.takes_text:
            item = CustomCallItem(
                id=new_id("ctc"),
                call_id=delta.call_id,
                name=tool.name,
                input="",
                status="in_progress",
                namespace=namespace,
            )
        else:
            item = FunctionCallItem(
                id=new_id("fc"),
                call_id=delta.call_id,
                name=tool.name,
                arguments="",
                status="in_progress",
                namespace=namespace,
            )
        opening, _ = self._begin(item)
        return opening

    def _arguments(self, text: str) -> bytes:
        if self._machine_call is not None:
            self._machine_arguments.append(text)
            return b""
        assert self._open is not None, "arguments follow the start of their call"
        return self._open.write(text)

    def _begin(self, item: WrittenItem) -> tuple[bytes, OpenItem]:
        as_summary = self._shape.as_summary and isinstance(item, ReasoningItem)
        self._open = OpenItem(item, len(self.items), self._writer, as_summary=as_summary)
        self.items.append(item)
        return self._open.begin(), self._open

    def _end_machine_call(self, call: ToolCallStart, *, is_cut: bool) -> bytes:
        """The events of a machine tool's call, which is output as a whole."""
        self._machine_call = None
        item = machine_call(call.name, call.call_id, "".join(self._machine_arguments), is_cut=is_cut)
        index = len(self.items)
        self.items.append(item)
        if self._writer is None:
            return b""
        added = self._writer.event("response.output_item.added", output_index=index, item=item)
        return added + self._writer.event("response.output_item.done", output_index=index, item=item)

    def _end(self, delta: MessageEnd) -> bytes:
        is_cut = not delta.complete and self._choice.is_cut
        if self._machine_call is not None:
            return self._end_machine_call(self._machine_call, is_cut=is_cut)
        open_item = self._open
        if open_item is None:
            return b""
        if isinstance(open_item.item, ReasoningItem):
            text = open_item.fill()
            self._shape.keep(open_item.item.id, text)
            if self._shape.seal is not None:
                open_item.item.encrypted_content = self._shape.seal.close(text)
        self._open = None
        return open_item.end("incomplete" if is_cut else "completed")

    def _logprobs_of(self, delta: TextDelta) -> list[ContentLogprob]:
        return content_logprobs(self._choice.logprobs_of(delta) or (), self._tokenizer)
