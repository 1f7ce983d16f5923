"""Server-sent events: their encoding, and the outbox that batches ready events into one write."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

KEEP_ALIVE = b": keep-alive\n\n"
CONTENT_TYPE = b"text/event-stream; charset=utf-8"
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

MAX_UNSENT_BYTES = 1 << 20


def event(body: msgspec.Struct) -> bytes:
    """One unnamed event. Encoded JSON has no line breaks, so the data is one line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class Outbox:
    """Buffers the bytes of one answer between its writers (one per choice) and its single reader.

    The reader takes all ready bytes at once, or lets writers `send` them to the client themselves, without
    waking it. While `full`, writers wait in `room()` for a slow client. Single event loop, no locks.
    """

    def __init__(self, num_writers: int) -> None:
        self.full = False
        self._num_writers = self._num_untaken = num_writers
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._num_puts = 0
        self._error: BaseException | type[BaseException] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._drained: asyncio.Event | None = None  # for writers that wait
        self._write: Callable[[bytes], Awaitable[None]] | None = None

    def taken(self, wait_s: float, comment: bytes) -> None:
        """A worker has taken one writer's request; `wait_s` after the last one, put a comment if nothing else
        was put.
        """
        self._num_untaken -= 1
        if not self._num_untaken:
            asyncio.get_running_loop().call_later(wait_s, self._put_first, comment)

    async def send(self, data: bytes) -> None:
        """Write bytes to the client, or let the reader do it, so that their order is kept."""
        if self._write is None or self._parts or self._reader is None:
            self.put(data)
            if self.full:
                await self.room()
        elif data:
            self._num_puts += 1
            await self._write(data)

    def put(self, data: bytes) -> None:
        """Add bytes; ignored if they are empty or come after an error."""
        if data and self._error is None:
            self._parts.append(data)
            self._num_bytes += len(data)
            self._num_puts += 1
            self.full = self._num_bytes > MAX_UNSENT_BYTES
            self._wake()

    def close(self, error: BaseException | type[BaseException] | None = None) -> None:
        """End one writer. The first error ends the whole answer, after the bytes put before it."""
        self._num_writers -= 1
        self._error = self._error or error
        self._wake()

    def fail(self, error: BaseException | type[BaseException]) -> None:
        """End the answer now and discard bytes that were not taken."""
        self._parts.clear()
        self.close(error)

    async def take(self, write: Callable[[bytes], Awaitable[None]] | None = None) -> bytes:
        """Wait for bytes and take all that are ready; b"" when every writer has ended. Raises the error.
        Meanwhile writers `write` theirs.
        """
        self._write, self._reader = write, None
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._num_writers <= 0:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._reader = None
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._num_bytes = 0
        self.full = False
        if self._drained is not None:
            self._drained.set()
        return data

    @property
    def is_over(self) -> bool:
        """Whether every byte was taken and no writer is left, nor an error."""
        return not self._parts and self._num_writers <= 0 and self._error is None

    async def room(self) -> None:
        """Wait until the reader has taken the buffered bytes."""
        while self.full:
            if self._drained is None or self._drained.is_set():
                self._drained = asyncio.Event()
            await self._drained.wait()

    async def keep_alive(self, every_s: float, comment: bytes = KEEP_ALIVE) -> None:
        """Put a comment after every `every_s` without other bytes. Runs until cancelled."""
        seen = self._num_puts
        while True:
            await asyncio.sleep(every_s)
            if self._num_puts == seen:
                self.put(comment)
            seen = self._num_puts

    def _put_first(self, comment: bytes) -> None:
        if not self._num_puts:
            self.put(comment)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
