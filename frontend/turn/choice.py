"""One choice of an answer: token chunks in; reasoning, text and tool calls out, up to the stop condition."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from baton.messages import FinishReason as WorkerFinishReason
from baton.messages import GenerateRequest, Sampling, TokenChunk, TokenLogprob
from frontend.harmony.conversation import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.text.detokenize import StopStrings
from frontend.turn.ids import new_call_id
from frontend.turn.thoughts import Writing


class ReceivedTokens:
    """`logprobs` has an entry per token, or is None if not requested; `prompt_logprobs` has an entry per
    prompt token except the first.

    A final stop token in `cut_ids` is counted, but is not part of the text.
    """

    def __init__(self, sampling: Sampling, cut_ids: Iterable[int]) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: WorkerFinishReason = "stop"
        self.logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._cut_ids = frozenset(cut_ids)

    def take(self, chunk: TokenChunk) -> tuple[int, ...]:
        """Record the chunk; returns the tokens that are text."""
        token_ids = chunk.token_ids
        self.num_tokens += len(token_ids)
        if self.logprobs is not None:
            self.logprobs += chunk.logprobs or ()
        if chunk.usage is not None:
            self.num_cached_tokens = chunk.usage.num_cached_tokens
        if chunk.finish_reason is None:
            return token_ids
        self.prompt_logprobs = chunk.prompt_logprobs or ()
        self.finish_reason = chunk.finish_reason
        is_cut = chunk.finish_reason == "stop" and token_ids and token_ids[-1] in self._cut_ids
        return token_ids[:-1] if is_cut else token_ids


class _Wrapped(msgspec.Struct, forbid_unknown_fields=True):
    input: str


class TextCalls:
    """Holds back the arguments of these tools' calls until they are complete; `{"input": TEXT}` becomes
    TEXT."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held: list[ToolCallArguments] | None = None

    def pass_on(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        """The deltas that can be sent now."""
        for delta in deltas:
            match delta:
                case ToolCallStart() if delta.name in self._names:
                    self._held = []
                case ToolCallArguments() if self._held is not None:
                    self._held.append(delta)
                    continue
                case MessageEnd():
                    yield from self._whole()
            yield delta

    def _whole(self) -> Iterator[Delta]:
        held, self._held = self._held, None
        if held:
            text = "".join(part.text for part in held)
            with suppress(msgspec.DecodeError):  # not wrapped: the text itself is the input
                text = msgspec.json.decode(text, type=_Wrapped).input
            yield replace(held[0], text=text)


FinishReason = Literal["stop", "length", "tool_calls"]


class Reader(Protocol):
    """Turns tokens into deltas; implemented by `HarmonyParser` and `RawText`."""

    repairs: Counter[str]

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far."""
        ...

    def feed(self, token_ids: Sequence[int]) -> Sequence[Delta]:
        """The deltas that these tokens complete."""
        ...

    def finish(self) -> Sequence[Delta]:
        """The deltas still held back at the end of the stream."""
        ...


class Choice:
    """`request` goes to a worker, `received` holds the tokens so far. `stopped` is set once a stop string or
    the call limit has ended the answer. `call_ids` and `thought` are the calls and the reasoning text so far,
    `writing` records the whole answer. `history` counts the prompt's assistant tokens by source. `text_tools`
    are the tools with free-text input. `caller`: see `Client.caller`."""

    def __init__(
        self,
        request: GenerateRequest,
        reader: Reader,
        *,
        stop_strings: Sequence[str] = (),
        max_calls: int | None = None,
        cut_ids: Iterable[int] = (),
        text_tools: frozenset[str] = frozenset(),
        caller: str = "",
        on_finish: Callable[["Choice"], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.caller = caller
        self.received = ReceivedTokens(request.sampling, cut_ids)
        self.stopped = False
        self.call_ids: list[str] = []
        self._thought: list[str] = []
        self._on_finish = on_finish
        self._reader = reader
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._max_calls = max_calls
        self._num_calls = 0
        self.writing = Writing()
        self.history: Mapping[str, int] = {}
        self._text_calls = TextCalls(text_tools) if text_tools else None
        self._tail: TextDelta | None = None  # token positions of the held-back text

    @property
    def repairs(self) -> Counter[str]:
        """Repairs of malformed output, by kind."""
        return self._reader.repairs

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens so far."""
        return self._reader.num_reasoning_tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended; valid once it has."""
        reason = "stop" if self.stopped else self.received.finish_reason
        return "tool_calls" if reason == "stop" and self.call_ids else reason

    @property
    def thought(self) -> str:
        """The reasoning text so far."""
        return "".join(self._thought)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._stops is None else self._stops.met

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at its token limit."""
        return self.finish_reason == "length"

    def feed(self, chunk: TokenChunk) -> Sequence[Delta]:
        """The deltas that a chunk completes."""
        token_ids = self.received.take(chunk)
        self.writing.token_ids += token_ids
        deltas = self._reader.feed(token_ids)
        if len(deltas) == 1 and self._stops is None and not self.stopped:  # the hot path
            delta = deltas[0]
            if type(delta) is TextDelta:
                self.writing.kind = "text"
                return deltas
            if type(delta) is ReasoningDelta:
                self.writing.kind = "thought"
                self._thought.append(delta.text)
                return deltas
        return self._noted(self._upto_stop(deltas))

    def finish(self) -> Sequence[Delta]:
        """The deltas left after the last chunk."""
        deltas = self._noted([*self._upto_stop(self._reader.finish()), *self._held()])
        self._on_finish(self)
        return deltas

    def logprobs_of(self, delta: TextDelta) -> list[TokenLogprob] | None:
        """The log probabilities of the delta's tokens, if requested."""
        logprobs = self.received.logprobs
        return None if logprobs is None else logprobs[delta.start : delta.stop]

    def _noted(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """The deltas, with an id assigned to each call."""
        if self._text_calls is not None:
            deltas = list(self._text_calls.pass_on(deltas))
        return [self._note(delta) for delta in deltas]

    def _note(self, delta: Delta) -> Delta:
        self.writing.note(delta)
        match delta:
            case ReasoningDelta(text=text):
                self._thought.append(text)
            case ToolCallStart():
                self.call_ids.append(new_call_id())
                return replace(delta, call_id=self.call_ids[-1])
        return delta

    def _upto_stop(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        if self._stops is None and self._max_calls is None:
            return deltas
        return [kept for delta in deltas for kept in self._kept(delta)]

    def _kept(self, delta: Delta) -> Iterator[Delta]:
        if self.stopped:
            return
        match delta:
            case TextDelta() if self._stops is not None:
                yield from self._text(delta, self._stops)
            case MessageEnd():
                yield from self._held()  # stop strings do not span messages
                yield delta
            case ToolCallStart() if self._num_calls == self._max_calls:
                self.stopped = True
            case ToolCallStart():
                self._num_calls += 1
                yield delta
            case _:
                yield delta

    def _text(self, delta: TextDelta, stops: StopStrings) -> Iterator[Delta]:
        text, self.stopped = stops.push(delta.text)
        said = replace(delta, text=text, start=delta.start if self._tail is None else self._tail.start)
        self._tail = replace(delta, start=delta.stop) if text else said
        if text:
            yield said

    def _held(self) -> Iterator[Delta]:
        text = "" if self._stops is None else self._stops.flush()
        if text and self._tail is not None:
            yield replace(self._tail, text=text)
        self._tail = None


def num_prompt_tokens(choices: Iterable[Choice]) -> int:
    """Tokens of all prompts; a prompt shared by several choices counts once."""
    return sum(len(c.request.token_ids) for c in choices if c.request.sampling.choice == 0)
