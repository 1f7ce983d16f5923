"""One choice of a chat answer: chunks through the Harmony parser, and what of its deltas the client gets."""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from baton.messages import GenerateRequest, TokenChunk
from frontend.answers import ChatFinish, ContentLogprob
from frontend.detokenize import StopStrings
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
from frontend.schema import ChatBody
from frontend.tokenizer import ModelTokenizer

# Between two messages of one kind: a preamble and the answer, two thoughts.
PARAGRAPH = "\n\n"


class ChatSink(Protocol):
    """Where a choice's deltas go; each call gives the bytes it adds to a stream."""

    def reasoning(self, text: str) -> bytes:
        """More of the chain of thought."""
        ...

    def text(self, text: str, logprobs: list[ContentLogprob] | None) -> bytes:
        """More visible text, with the log probabilities of its tokens if they were asked for."""
        ...

    def call(self, index: int, name: str) -> bytes:
        """A call begins; `index` counts from 0."""
        ...

    def arguments(self, index: int, text: str) -> bytes:
        """More argument text of a call."""
        ...

    def end(self, finish_reason: ChatFinish) -> bytes:
        """The choice is complete."""
        ...


class ChatChoice:
    """A `Choice` of `frontend.respond`. Its text ends before a stop string; with `parallel_tool_calls` false
    it ends before a second call."""

    def __init__(
        self,
        body: ChatBody,
        tokenizer: ModelTokenizer,
        request: GenerateRequest,
        offered_tools: frozenset[str],
        sink: ChatSink,
    ) -> None:
        self.request = request
        self.received = ReceivedTokens(request.sampling, body.stop_token_ids or ())
        self.stopped = False
        self._sink = sink
        self._tokenizer = tokenizer
        self._parser = HarmonyParser(tokenizer.vocabulary, offered_tools, may_call=body.tool_choice != "none")
        self._stops = (
            StopStrings([body.stop] if isinstance(body.stop, str) else body.stop) if body.stop else None
        )
        self._gives_reasoning = body.include_reasoning is not False
        self._max_calls = 1 if body.parallel_tool_calls is False else None
        self._num_logprobs_given = 0
        self._num_calls = 0
        self._gap = {ReasoningDelta: "", TextDelta: ""}
        self._open: type[ReasoningDelta] | type[TextDelta] | None = None
        self._is_plain = self._stops is None and self.received.logprobs is None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning text so far."""
        return self._parser.num_reasoning_tokens

    @property
    def repairs(self) -> Counter[str]:
        """Malformed Harmony that was understood, by kind."""
        return self._parser.repairs

    def feed(self, chunk: TokenChunk) -> bytes:
        """The bytes of a chunk's deltas."""
        return self._write(self._parser.feed(self.received.take(chunk)))

    def finish(self) -> bytes:
        """The bytes of what the parser and the stop strings held back, and of the end."""
        out = b"" if self.stopped else self._write(self._parser.finish())
        finish_reason: ChatFinish = "stop" if self.stopped else self.received.finish_reason
        if finish_reason == "stop" and self._num_calls:
            finish_reason = "tool_calls"
        return out + self._sink.end(finish_reason)

    def _write(self, deltas: Sequence[Delta]) -> bytes:
        out = b""
        for delta in deltas:
            if not self.stopped:
                out += self._delta(delta)
        return out

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case TextDelta():
                return self._text(delta)
            case ReasoningDelta():
                return self._sink.reasoning(self._spaced(delta)) if self._gives_reasoning else b""
            case ToolCallArguments():
                return self._sink.arguments(delta.index, delta.text)
            case ToolCallStart():
                return self._begin_call(delta)
            case MessageEnd():
                return self._end_message()

    def _begin_call(self, delta: ToolCallStart) -> bytes:
        if self._num_calls == self._max_calls:
            self.stopped = True
            return b""
        self._num_calls += 1
        return self._sink.call(delta.index, delta.name)

    def _text(self, delta: TextDelta) -> bytes:
        if self._is_plain and self._open is TextDelta:  # nearly every token of an answer
            return self._sink.text(delta.text, None)
        text = self._spaced(delta)
        if self._stops is not None:
            text, self.stopped = self._stops.push(text)
        if not text:
            return b""
        return self._sink.text(text, self._logprobs_up_to(delta))

    def _end_message(self) -> bytes:
        """No stop string reaches from one message into the next, so what was held back is let go."""
        was_open, self._open = self._open, None
        if was_open is None:
            return b""
        self._gap[was_open] = PARAGRAPH
        held = self._stops.flush() if self._stops is not None and was_open is TextDelta else ""
        return self._sink.text(held, None if self.received.logprobs is None else []) if held else b""

    def _spaced(self, delta: TextDelta | ReasoningDelta) -> str:
        """The delta's text, after a paragraph break if it begins another message of its kind."""
        kind = type(delta)
        if self._open is kind:
            return delta.text
        self._open = kind
        return self._gap[kind] + delta.text

    def _logprobs_up_to(self, delta: TextDelta) -> list[ContentLogprob] | None:
        logprobs = self.received.logprobs
        if logprobs is None:
            return None
        start = max(self._num_logprobs_given, delta.start)
        self._num_logprobs_given = max(delta.stop, self._num_logprobs_given)
        return content_logprobs(logprobs[start : delta.stop], self._tokenizer)
