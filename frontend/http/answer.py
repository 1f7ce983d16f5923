"""An answer of one API; its events may be numbered, so that a client whose connection broke gets the rest.

No frontend keeps a numbered stream: any of them generates the answer again, from the same seed and with the
same ids, and leaves out the events that the client has. The checksum in an event's id shows whether it is
the same answer.
"""

import re
import zlib
from collections.abc import Iterator, Sequence

import msgspec

from baton.errors import BatonError, InvalidRequest
from baton.messages import TokenChunk
from frontend.record import Record
from frontend.turn.choice import Choice, single_tokens

KEEP_ALIVE = b": keep-alive\n\n"
_ID = re.compile(r"(\d{1,9})\.(\d{1,9})\.([0-9a-f]{8})")


class Answer:
    """An answer of one API. `ignored` are the body's ignored fields, `keep_alive` is sent while the stream is
    idle, `record` is the request's. Events are empty bytes if the answer is not streamed.
    """

    model: str
    stream: bool
    choices: Sequence[Choice]
    ignored: tuple[str, ...] = ()
    keep_alive = KEEP_ALIVE
    record: Record | None = None

    def opening(self) -> bytes:
        """The stream's first events."""
        return b""

    def feed(self, index: int, chunk: TokenChunk) -> bytes:
        """The events of a chunk of one choice."""
        raise NotImplementedError

    def finish(self, index: int) -> bytes:
        """The last events of one choice."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """The stream's last events."""
        return b""

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a failed stream."""
        raise NotImplementedError

    def body(self) -> msgspec.Struct:
        """The whole answer, if it is not streamed."""
        raise NotImplementedError

    async def settle(self) -> None:
        """Store what has to be stored; awaited once, when the answer has ended or failed, before its end is
        sent.
        """


class StreamChanged(InvalidRequest):
    """The answer cannot be repeated: it is not the one that the client has the beginning of."""

    code = "stream_changed"
    status = 409


class Numbered(Answer):
    """A streamed answer of one choice whose events have ids: the number of tokens so far, the number of the
    event, and a checksum of the tokens. Events up to `last_event_id` are left out.
    """

    def __init__(self, answer: Answer, last_event_id: str) -> None:
        """`last_event_id`: of the last event that the client has; empty: none. Raises InvalidRequest."""
        self.model, self.stream, self.ignored = answer.model, answer.stream, answer.ignored
        self.choices, self.keep_alive = answer.choices, answer.keep_alive
        self._answer = answer
        self._num_tokens = self._num_events = self._checksum = 0
        self._had, self._had_checksum = (0, 0), 0
        if last_event_id:
            found = _ID.fullmatch(last_event_id)
            if found is None:
                raise InvalidRequest(
                    f"`Last-Event-ID` is {last_event_id[:40]!r}; send the `id` of the last event that came.",
                    param="Last-Event-ID",
                )
            self._had, self._had_checksum = (int(found[1]), int(found[2])), int(found[3], 16)

    def opening(self) -> bytes:
        return self._numbered(self._answer.opening(), 0, 0, 0)

    def feed(self, index: int, chunk: TokenChunk) -> bytes:
        """The events of a chunk, token by token, so that they are the same however tokens come together.
        Raises StreamChanged.
        """
        events = []
        for token in self._tokens(chunk):
            events.append(self._number(self._answer.feed(index, token)))
            if self.choices[index].stopped:
                break
        return b"".join(events)

    def finish(self, index: int) -> bytes:
        events = self._answer.finish(index)
        if self._num_tokens < self._had[0]:
            raise _changed()
        return self._number(events)

    def closing(self) -> bytes:
        return self._answer.closing()

    def failure(self, error: BatonError) -> bytes:
        return self._answer.failure(error)

    async def settle(self) -> None:
        await self._answer.settle()

    def _tokens(self, chunk: TokenChunk) -> Iterator[TokenChunk]:
        """See `single_tokens`."""
        for each in single_tokens(chunk):
            for token_id in each.token_ids:
                self._num_tokens += 1
                self._checksum = zlib.crc32(b"%d," % token_id, self._checksum)
                if self._num_tokens == self._had[0] and self._checksum != self._had_checksum:
                    raise _changed()
            yield each

    def _number(self, events: bytes) -> bytes:
        """Events that the last token has completed."""
        numbered = self._numbered(events, self._num_tokens, self._num_events, self._checksum)
        self._num_events += events.count(b"\n\n")
        return numbered

    def _numbered(self, events: bytes, num_tokens: int, num_before: int, checksum: int) -> bytes:
        return b"".join(
            b"%b\nid: %d.%d.%08x\n\n" % (event, num_tokens, number, checksum)
            for number, event in enumerate(events.split(b"\n\n")[:-1], num_before + 1)
            if (num_tokens, number) > self._had
        )


def _changed() -> StreamChanged:
    return StreamChanged(
        "The answer to this request is not the one that `Last-Event-ID` is from; send it without that header."
    )
