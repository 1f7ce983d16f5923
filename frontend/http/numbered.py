"""Numbers a stream's events, so that a client whose connection broke gets the rest, from any frontend.

No frontend keeps the stream: the answer is generated again, from the same seed and with the same ids, and
the events that the client has are left out. The checksum in an event's id shows if the answer is another.
"""

import re
import zlib
from collections.abc import Iterator

from baton.errors import BatonError, InvalidRequest
from baton.messages import TokenChunk

_ID = re.compile(r"(\d{1,9})\.(\d{1,9})\.([0-9a-f]{8})")


class StreamChanged(BatonError):
    """The answer cannot be repeated: it is not the one that the client has the beginning of."""

    code = "stream_changed"
    status = 409
    kind = "invalid_request_error"


class EventNumbers:
    """The ids of one answer's events: how many tokens it had, which event it was, and a checksum of the
    tokens.
    """

    def __init__(self, last_event_id: str) -> None:
        """`last_event_id`: of the last event that the client has; empty: none. Raises InvalidRequest."""
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

    def tokens(self, chunk: TokenChunk) -> Iterator[TokenChunk]:
        """Each token of a chunk, for its own events; one without tokens as it is. Raises StreamChanged."""
        if not chunk.token_ids:
            yield chunk
        for i, token_id in enumerate(chunk.token_ids):
            self._num_tokens += 1
            self._checksum = zlib.crc32(b"%d," % token_id, self._checksum)
            if self._num_tokens == self._had[0] and self._checksum != self._had_checksum:
                raise _changed()
            logprobs = chunk.logprobs and chunk.logprobs[i : i + 1]
            finish_reason = chunk.finish_reason if i + 1 == len(chunk.token_ids) else None
            usage = chunk.usage if i == 0 else None  # a stop string may end the answer at any token
            yield TokenChunk((token_id,), finish_reason, usage, logprobs)

    def opening(self, events: bytes) -> bytes:
        """The stream's first events, which precede every token."""
        return self._numbered(events, 0, 0, 0)

    def number(self, events: bytes) -> bytes:
        """Events that the last token has completed."""
        numbered = self._numbered(events, self._num_tokens, self._num_events, self._checksum)
        self._num_events += events.count(b"\n\n")
        return numbered

    def end(self) -> None:
        """The answer has ended. Raises StreamChanged."""
        if self._num_tokens < self._had[0]:
            raise _changed()

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
