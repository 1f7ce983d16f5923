"""The output of a response: turns a choice's deltas into output items and events."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import UNSET

from frontend.harmony.conversation import FUNCTIONS, Tool
from frontend.harmony.deltas import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.responses.events import EventWriter, OpenItem
from frontend.responses.items import (
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    Phase,
    ReasoningItem,
    WrittenItem,
)
from frontend.responses.machine import call_item
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice
from frontend.turn.ids import new_id
from frontend.turn.logprobs import ContentLogprob, content_logprobs
from frontend.turn.seal import Seal


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
        item = call_item(call.name, call.call_id, "".join(self._machine_arguments), is_cut=is_cut)
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
