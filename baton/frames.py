"""The protocol of every request plane: typed signals, batched into numbered frames.

A frame is `[number, [signal, ...]]` in msgpack, with everything that one side had ready in one turn of its
event loop. Frames are numbered from 0 in each direction of a link, so that a lost one is detected. The first
frame is a single `Hello`, so that unknown callers cannot send more."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from baton.errors import BatonError, EngineFailure, ErrorInfo, InvalidRequest
from baton.messages import UNDECODABLE, Reply, Request

VERSION = 3
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Limit for sending and receiving. A plane may allow less: NATS its server's max_payload (1 MiB)."""
MAX_HELLO_BYTES = 1024
"""Limit for a caller's first frame."""

_LENGTH_BYTES = 4


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Opens each direction of a link: the protocol version and the worker that the caller addresses."""

    version: int
    worker: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Starts a stream, whose number is new on this link."""

    stream: int
    request: Request


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The caller stopped iterating."""

    stream: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The caller consumed this many replies; the worker may send as many more."""

    stream: int
    num_replies: int


class Next(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """One reply."""

    stream: int
    reply: Reply


class End(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The stream is complete, or it failed with this error."""

    stream: int
    error: ErrorInfo | None = None


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A heartbeat: the sender's event loop is running. Both sides send one at each tick."""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The sender dropped the link with all of its streams."""

    reason: str


ToWorker = Hello | Open | Cancel | Credit | Beat | Goodbye
ToCaller = Hello | Next | End | Beat | Goodbye
Signal = ToWorker | ToCaller
T = TypeVar("T")

FROM_CALLER = msgspec.msgpack.Decoder(tuple[int, list[ToWorker]])
FROM_WORKER = msgspec.msgpack.Decoder(tuple[int, list[ToCaller]])
_ENCODER = msgspec.msgpack.Encoder()


class LinkBroken(Exception):
    """The peer's data cannot be trusted, so the link must be dropped. Never raised to users of a plane."""


class Wire(Protocol):
    """What a plane provides to a link: a way to send frames. `writable` is clear while too much is unsent."""

    writable: asyncio.Event

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that `send` takes."""
        ...

    def send(self, frame: bytes) -> None:
        """Send or buffer a frame. Never waits; does nothing after `close`."""
        ...

    def close(self) -> None:
        """Drop the peer after sending what is buffered; sets `writable`."""
        ...


class FrameWriter:
    """Batches signals to one peer: those put in one turn of the event loop leave in one frame.

    `refuse(signal, error)` is called for a signal that cannot be sent (too large, or not encodable) and may
    return a small one that is sent in its place."""

    def __init__(self, wire: Wire, refuse: Callable[[Signal, BatonError], Signal | None]) -> None:
        self._wire = wire
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Signal] = []
        self._number = 0
        self._closed = False

    def put(self, signal: Signal) -> None:
        """Send `signal` at the end of this turn."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(signal)

    def close(self, last: Goodbye) -> None:
        """Send what is waiting and `last` at once, and nothing after it."""
        self._waiting.append(last)
        self._flush()
        self._closed = True

    def _flush(self) -> None:
        signals, self._waiting = self._waiting, []
        if not signals or self._closed:
            return
        if self._number == 0:
            self._send(signals[:1])  # the Hello
            del signals[:1]
        if signals:
            self._send(signals)

    def _send(self, signals: list[Signal]) -> None:
        """Send one frame; a frame for each signal if it is too large or cannot be encoded."""
        try:
            frame, limit = _ENCODER.encode((self._number, signals)), self._wire.max_frame_bytes
        except (TypeError, ValueError, OverflowError) as error:
            refusal: BatonError = EngineFailure(f"a message cannot be encoded: {error}")
        else:
            if len(frame) <= limit:
                self._number += 1
                self._wire.send(frame)
                return
            refusal = InvalidRequest(
                f"a message of {len(frame)} bytes exceeds this request plane's limit of {limit}"
            )
        if len(signals) > 1:
            for signal in signals:
                self._send([signal])
        elif (instead := self._refuse(signals[0], refusal)) is not None:
            self._send([instead])


class FrameReader(Generic[T]):
    """Decodes the frames of one peer and checks version, worker and order.

    It also counts frames, `num_heard`, and ticks of silence. Ticks, not seconds: a process that was itself
    suspended first reads what waits in its sockets before it declares peers dead."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[tuple[int, list[T]]]", worker: str) -> None:
        self._decoder = decoder
        self._worker = worker
        self.num_heard = 0
        self.num_silent_ticks = 0

    def open(self, frame: bytes | bytearray) -> list[T]:
        """Decode the next frame. Raises LinkBroken."""
        try:
            number, signals = self._decoder.decode(frame)
        except UNDECODABLE as error:
            raise LinkBroken(f"version {VERSION} cannot decode its frame: {error}") from None
        if number < self.num_heard:
            return []  # on a shared medium, anyone may send again what was sent before
        if number != self.num_heard:
            raise LinkBroken(f"frame {self.num_heard} was lost, got frame {number}")
        if number == 0:
            self._check_hello(signals)
        self.num_heard += 1
        self.num_silent_ticks = 0
        return signals

    def tick(self) -> int:
        """Count one tick; returns the ticks since the last frame."""
        self.num_silent_ticks += 1
        return self.num_silent_ticks

    def _check_hello(self, signals: list[T]) -> None:
        hello = signals[0] if signals else None
        if not isinstance(hello, Hello):
            raise LinkBroken("it did not send a Hello")
        if hello.version != VERSION:
            raise LinkBroken(f"it uses protocol version {hello.version}, this process {VERSION}")
        if hello.worker != self._worker:
            raise LinkBroken("it calls a worker of another name")


def with_length(frame: bytes) -> bytes:
    """`frame` for a byte stream: four bytes of length, big-endian, then the frame."""
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class Splitter:
    """Splits a byte stream into frames; the first frame may have its own limit."""

    def __init__(self, max_first_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_first_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """The frames that `data` completes. Raises LinkBroken for a length over the limit."""
        buffer = self._buffer
        buffer += data
        frames: list[bytearray] = []
        start, num_bytes = 0, len(buffer)
        while num_bytes - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            size = int.from_bytes(buffer[start:begin], "big")
            if size > self._max_bytes:
                raise LinkBroken(f"a frame of {size} bytes exceeds the limit of {self._max_bytes}")
            if num_bytes < begin + size:
                break
            self._max_bytes = MAX_FRAME_BYTES
            start = begin + size
            frames.append(buffer[begin:start])
        del buffer[:start]
        return frames
