"""The one choice of a response: chunks through the Harmony parser, its deltas into output items."""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton.messages import GenerateRequest, TokenChunk
from frontend.answers import ContentLogprob
from frontend.chat_sinks import new_call_id
from frontend.harmony.deltas import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.harmony.parse import HarmonyParser
from frontend.logprobs import content_logprobs
from frontend.received import ReceivedTokens
from frontend.response_events import EventWriter, OpenItem
from frontend.response_items import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    Phase,
    ReasoningItem,
    new_id,
)
from frontend.tokenizer import ModelTokenizer


class ResponseChoice:
    """A `Choice` of `frontend.respond`. Each Harmony message is an item. Without `may_call` there are no
    calls; with `max_calls` the answer ends before one too many."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        request: GenerateRequest,
        offered_tools: frozenset[str],
        writer: EventWriter | None,
        *,
        may_call: bool = True,
        max_calls: int | None = None,
        cut_ids: Iterable[int] = (),
    ) -> None:
        self.request = request
        self.received = ReceivedTokens(request.sampling, cut_ids)
        self.stopped = False
        self.items: list[OutputItem] = []
        self._tokenizer = tokenizer
        self._parser = HarmonyParser(tokenizer.vocabulary, offered_tools, may_call=may_call)
        self._writer = writer
        self._max_calls = max_calls
        self._open: OpenItem | None = None
        self._num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far."""
        return self._parser.num_reasoning_tokens

    @property
    def repairs(self) -> Counter[str]:
        """Malformed Harmony that was understood, by kind."""
        return self._parser.repairs

    def feed(self, chunk: TokenChunk) -> bytes:
        """The events of a chunk."""
        return self._write(self._parser.feed(self.received.take(chunk)))

    def finish(self) -> bytes:
        """The events of what the parser held back."""
        return b"" if self.stopped else self._write(self._parser.finish())

    def fill(self) -> None:
        """Put the text so far into the item that is being written."""
        if self._open is not None:
            self._open.fill()

    def interrupt(self) -> None:
        """Nothing more comes: the item that is being written stays incomplete."""
        if self._open is not None:
            self._open.fill()
            self._open.item.status = "incomplete"
            self._open = None

    def _write(self, deltas: Sequence[Delta]) -> bytes:
        out = b""
        for delta in deltas:
            if not self.stopped:
                out += self._delta(delta)
        return out

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                opening, item = self._message(delta)
                return opening + item.write(delta.text, self._logprobs_of(delta))
            case ReasoningDelta():
                opening, item = self._reasoning()
                return opening + item.write(delta.text)
            case ToolCallArguments():
                assert self._open is not None, "arguments follow the start of their call"
                return self._open.write(delta.text)
            case ToolCallStart():
                return self._begin_call(delta.name)
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

    def _begin_call(self, name: str) -> bytes:
        if self._num_calls == self._max_calls:
            self.stopped = True
            return b""
        self._num_calls += 1
        opening, _ = self._begin(
            FunctionCallItem(
                id=new_id("fc"), call_id=new_call_id(), name=name, arguments="", status="in_progress"
            )
        )
        return opening

    def _begin(self, item: OutputItem) -> tuple[bytes, OpenItem]:
        self._open = OpenItem(item, len(self.items), self._writer)
        self.items.append(item)
        return self._open.begin(), self._open

    def _end(self, delta: MessageEnd) -> bytes:
        open_item, self._open = self._open, None
        if open_item is None:
            return b""
        is_cut = not delta.complete and self.received.finish_reason == "length"
        return open_item.end("incomplete" if is_cut else "completed")

    def _logprobs_of(self, delta: TextDelta) -> list[ContentLogprob]:
        logprobs = self.received.logprobs or []
        return content_logprobs(logprobs[delta.start : delta.stop], self._tokenizer)
