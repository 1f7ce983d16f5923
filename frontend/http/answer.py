"""Answers of the APIs, numbered ones, and those of chat and raw completions: whole, or as chunks."""

import importlib.metadata
import time
import zlib
from collections.abc import Callable, Sequence

import msgspec

from baton.errors import BatonError, InvalidRequest
from baton.messages import TokenChunk, TokenLogprob
from frontend.harmony.parse import Delta
from frontend.http.exchange import ErrorBody
from frontend.record import Record
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.choice import Choice, num_prompt_tokens, single_tokens
from frontend.turn.fields import CommonFields, StreamOptions
from frontend.turn.ids import new_id

KEEP_ALIVE = b": keep-alive\n\n"


class Writer:
    """Writes one choice as events, which are empty bytes if the answer is not streamed, or whole."""

    choice: Choice

    def opening(self) -> bytes:
        """The first events, before the first token."""
        return b""

    def feed(self, chunk: TokenChunk) -> bytes:
        """The events of a chunk."""
        return self.write(self.choice.feed(chunk))

    def finish(self) -> bytes:
        """The choice's last events."""
        return self.write(self.choice.finish())

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        if len(deltas) == 1:  # the hot path
            return self.write_one(deltas[0])
        return b"".join([self.write_one(delta) for delta in deltas])

    def write_one(self, delta: Delta) -> bytes:
        """The events of a delta."""
        raise NotImplementedError

    def body(self) -> msgspec.Struct:
        """The whole choice or answer, as far as it has come."""
        raise NotImplementedError


class Answer(Writer):
    """An answer of one API, which itself writes its choice if it has one only. `ignored` are the body's
    ignored fields, `keep_alive` is sent while the stream is idle, `record` is the request's."""

    stream: bool
    choices: Sequence[Choice]
    ignored: tuple[str, ...] = ()
    keep_alive = KEEP_ALIVE
    record: Record | None = None

    def writer(self, index: int) -> Writer:  # noqa: ARG002  there is one choice
        return self

    def closing(self) -> bytes:
        """The stream's last events."""
        return b""

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a failed stream."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Store what has to be stored; awaited once, before the end of the answer is sent."""


class StreamChanged(InvalidRequest, code="stream_changed", status=409):
    """The answer cannot be repeated: it is not the one that the client has the beginning of."""

    default = (
        "The answer to this request is not the one that `Last-Event-ID` is from; send it without that header."
    )


class Numbered(Answer):
    """A streamed answer of one choice whose events have ids: the number of the event, and a checksum of the
    tokens so far. Events up to `last_event`, which the client has, are left out.

    No frontend keeps a numbered stream: any of them generates the answer again, from the same seed and with
    the same ids. The checksum shows whether it is the same answer."""

    def __init__(self, answer: Answer, last_event: tuple[int, int]) -> None:
        self.stream, self.ignored = answer.stream, answer.ignored
        self.choices, self.keep_alive = answer.choices, answer.keep_alive
        # These have no ids.
        self.closing, self.failure, self.settle = answer.closing, answer.failure, answer.settle  # type: ignore[method-assign]  # no call between
        self._writer = answer.writer(0)
        self._number = self._checksum = 0
        self._last_number, self._last_checksum = last_event
        self._opening = self._numbered(answer.opening())

    def opening(self) -> bytes:
        return self._opening

    def feed(self, chunk: TokenChunk) -> bytes:
        """Token by token, so that events are the same however tokens come together. Raises StreamChanged."""
        events = b""
        for token in single_tokens(chunk):
            for token_id in token.token_ids:
                self._checksum = zlib.crc32(b"%d," % token_id, self._checksum)
            events += self._numbered(self._writer.feed(token))
            if self.choices[0].stopped:
                break
        return events

    def finish(self) -> bytes:
        events = self._numbered(self._writer.finish())
        if self._number < self._last_number:
            raise StreamChanged
        return events

    def _numbered(self, events: bytes) -> bytes:
        numbered = b""
        for event in events.split(b"\n\n")[:-1]:
            self._number += 1
            if self._number == self._last_number and self._checksum != self._last_checksum:
                raise StreamChanged
            if self._number > self._last_number:
                numbered += b"%b\nid: %d.%08x\n\n" % (event, self._number, self._checksum)
        return numbered


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens; `bytes` are its UTF-8 bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the visible text, and the most likely alternatives."""

    top_logprobs: list[TopLogprob]


def content_logprobs(entries: Sequence[TokenLogprob], tokenizer: ModelTokenizer) -> list[ContentLogprob]:
    """The chat API's shape: one object per token."""

    def fields(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        data = tokenizer.token_bytes(token_id)
        return data.decode(errors="replace"), finite(logprob), list(data)

    return [
        ContentLogprob(
            *fields(entry.token_id, entry.logprob), [TopLogprob(*fields(*pair)) for pair in entry.top]
        )
        for entry in entries
    ]


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI uses -9999 for a probability of zero."""
    return max(logprob, -9999.0)


class PromptDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the prompt tokens; `cached_tokens` were found in the KV cache."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, kw_only=True):
    """Breakdown of the completion tokens."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts of a whole answer; a prompt shared by several choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> "UsageBody":
        num_prompt = num_prompt_tokens(choices)
        num_completion = sum([choice.num_tokens for choice in choices])
        firsts = [choice for choice in choices if choice.request.sampling.choice == 0]
        num_cached = sum([choice.num_cached_tokens for choice in firsts])
        num_reasoning = sum([choice.num_reasoning_tokens for choice in choices])
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            completion_tokens_details=CompletionDetails(reasoning_tokens=num_reasoning),
            prompt_tokens_details=PromptDetails(cached_tokens=num_cached),
        )


def _timings(record: Record) -> dict[str, object]:
    """Where a stream's time went until now: milliseconds by stage, of several choices those of the slowest,
    from the request's arrival to this chunk and to the first token, and between two tokens at most."""
    first_s = record.first_token_s
    return {
        "stages": {stage: _ms(lasted_s) for stage, lasted_s in record.spent().items()},
        "attempts": len(record.attempts),
        "longest_gap_ms": _ms(record.gap_s),
        "duration_ms": _ms(time.perf_counter() - record.began_s),
        "ttft_ms": None if first_s is None else _ms(first_s),
    }


def _ms(lasted_s: float) -> float:
    return round(lasted_s * 1000, 1)


SYSTEM_FINGERPRINT = f"baton-{importlib.metadata.version('baton')}"
DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Envelope:
    """The fields shared by all chunks of an answer. `head` is a chunk up to its list of choices, `tail` is
    everything after that list."""

    def __init__(self, kind: str, id_prefix: str, model: str, body: CommonFields) -> None:
        self.fields = {
            "id": new_id(id_prefix, "-"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        options = body.stream_options or StreamOptions()
        self.stream, self.has_timings = bool(body.stream), bool(options.include_timings)
        self.has_usage = self.has_timings or bool(options.include_usage)
        head = {"id": self.fields["id"], "object": kind, **self.fields}
        self.head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if self.has_usage else b"]}\n\n"


class ChoiceWriter(Writer):
    """Builds one choice of an answer, as chunks or whole."""

    def __init__(self, index: int, choice: Choice, envelope: Envelope) -> None:
        self.index = index
        self.choice = choice
        self.head, self.tail = envelope.head, envelope.tail
        self.stream = envelope.stream

    def finish(self) -> bytes:
        last = super().finish()
        return last + self.end() if self.stream else b""

    def end(self) -> bytes:
        """The last chunk."""
        raise NotImplementedError


class ChunkedAnswer(Answer):
    """The answer to a chat or completion body, with a `writer` for each choice. `whole` makes its body of the
    envelope's fields, the choices and the usage."""

    def __init__(
        self,
        envelope: Envelope,
        choices: Sequence[Choice],
        writer: Callable[[int, Choice, Envelope], ChoiceWriter],
        whole: Callable[..., msgspec.Struct],
    ) -> None:
        self.stream = envelope.stream
        self.choices = choices
        self._envelope = envelope
        self._writers = [writer(index, choice, envelope) for index, choice in enumerate(choices)]
        self._whole = whole

    def writer(self, index: int) -> ChoiceWriter:
        return self._writers[index]

    def opening(self) -> bytes:
        return b"".join(writer.opening() for writer in self._writers)

    def closing(self) -> bytes:
        """The usage and the timings, if requested, and the end of the stream."""
        if not self._envelope.has_usage:
            return DONE
        last = b'],"usage":' + _encode(UsageBody.of(self.choices))
        if self._envelope.has_timings and self.record is not None:
            last += b',"timings":' + _encode(_timings(self.record))
        return self._envelope.head + last + b"}\n\n" + DONE

    def failure(self, error: BatonError) -> bytes:
        return b"data: " + _encode(ErrorBody.of(error)) + b"\n\n"

    def body(self) -> msgspec.Struct:
        choices = [writer.body() for writer in self._writers]
        return self._whole(**self._envelope.fields, choices=choices, usage=UsageBody.of(self.choices))
