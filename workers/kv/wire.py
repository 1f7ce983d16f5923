"""The messages between the two ends of a pull, and the connections that carry them.

    puller                      source
    Ask(offer, secret)   ->
                         <-     Grant, the bytes, Stands; or Refused
    Fetched              ->

A puller that reads the source's memory itself confirms first:

    Ask(direct)          ->
                         <-     Grant(words), or Refused
    Fetched              ->
                         <-     Stands

Stands makes withdrawal safe: bytes read from memory that was withdrawn meanwhile are discarded. The end of
the connection tells each side at once that the other is lost. Otherwise it is used for the next pull.
"""

import asyncio
import logging
import socket
import struct
from typing import Final, TypeVar

import msgspec

from baton.errors import HandoffFailed
from baton.messages import UNDECODABLE
from workers.kv.stall import Stall

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_MAX_WORD_BYTES = 64 * 1024
# Copy at most this much per turn of the event loop: about 0.1 ms.
_SLICE_BYTES = 256 * 1024
_BUFFER_BYTES = 16 * 1024
# Up to this size it is cheaper to copy a payload than to send its parts one by one.
_SMALL_BYTES = 64 * 1024


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The puller's request for the last `num_bytes` of an offer; the secret comes from the ticket.

    `direct`: the puller reads the source's memory itself; otherwise the bytes follow the Grant on this
    socket.
    """

    offer_id: int
    secret: bytes
    num_bytes: int
    direct: bool


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """The offer stands. For direct reads, `words` describes how to read the memory."""

    words: bytes = b""


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The puller has every byte and reads no more."""


class Stands(msgspec.Struct, frozen=True, array_like=True, tag="stands"):
    """The offer stood until the last byte was sent, or the puller finished: the bytes are valid."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The puller gets no bytes, with the reason."""

    reason: str


Word = Ask | Grant | Fetched | Stands | Refused
_W = TypeVar("_W", Ask, Grant, Fetched, Stands)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


class Connection:
    """One end of a connected, nonblocking socket; one task reads, one writes.

    Every method raises OSError if the peer is lost. `stall` is told of all that arrives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock: Final = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._stop = 0  # of what was received and not yet read
        self.stall: Stall | None = None

    async def send(self, *words: Word) -> None:
        """Send messages."""
        await self._write(b"".join(map(_framed, words)))

    async def send_between(self, first: Word, payload: memoryview, last: Word) -> None:
        """Send a message, bytes, and a message. Larger payloads are not copied."""
        if len(payload) <= _SMALL_BYTES:
            await self._write(_framed(first) + payload + _framed(last))
            return
        await self.send(first)
        for start in range(0, len(payload), _SLICE_BYTES):
            await self._write(payload[start : start + _SLICE_BYTES])
            await asyncio.sleep(0)  # writing does not suspend while there is room
        await self.send(last)

    async def receive(self, expected: type[_W]) -> _W:
        """Receive one message of the expected type.

        Raises HandoffFailed for a Refused, ConnectionError for garbage.
        """
        await self._fill(_LENGTH.size)
        (num_bytes,) = _LENGTH.unpack_from(self._buffer, self._start)
        if num_bytes > _MAX_WORD_BYTES:
            raise ConnectionError(f"a message of {num_bytes} bytes exceeds {_MAX_WORD_BYTES}")
        await self._fill(_LENGTH.size + num_bytes)
        begin = self._start + _LENGTH.size
        self._start = begin + num_bytes
        try:
            word = _decoder.decode(memoryview(self._buffer)[begin : self._start])
        except UNDECODABLE as error:
            raise ConnectionError(f"not a message of this protocol: {error}") from error
        if isinstance(word, Refused):
            raise HandoffFailed(word.reason)
        if not isinstance(word, expected):
            raise ConnectionError(f"got {type(word).__name__} instead of {expected.__name__}")
        return word

    async def receive_bytes(self, into: memoryview) -> None:
        """Fill `into`; most of a large payload is not copied."""
        done = min(self._stop - self._start, len(into))
        into[:done] = memoryview(self._buffer)[self._start : self._start + done]
        self._start += done
        while done < len(into):
            done += await self._receive_into(into[done : done + _SLICE_BYTES])
            await asyncio.sleep(0)  # reading does not suspend while data is available

    def is_quiet(self) -> bool:
        """Whether the peer neither hung up nor sent anything that was not read."""
        if self._start < self._stop:
            return False
        try:
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK)  # also of an SSLSocket
        except BlockingIOError:
            return True
        except OSError:
            pass  # reset: it hung up
        return False

    async def open(self) -> None:
        """Do what is needed before the first message."""

    def shut_down(self, how: int) -> None:
        """End one direction or both, which wakes the tasks at both ends."""
        try:
            socket.socket.shutdown(self.sock, how)  # an SSLSocket's own method would drop its keys
        except OSError as error:
            log.debug("shutdown error=%s", error)  # the peer was faster

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    async def _write(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self.sock, data)

    async def _read_into(self, into: memoryview) -> int:
        return await self._loop.sock_recv_into(self.sock, into)

    async def _fill(self, num_bytes: int) -> None:
        """Receive until so many bytes are in the buffer."""
        num_held = self._stop - self._start
        if num_held < num_bytes and self._start:
            self._buffer[:num_held] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, num_held
        self._buffer += bytes(max(num_bytes - len(self._buffer), 0))
        while self._stop - self._start < num_bytes:
            self._stop += await self._receive_into(memoryview(self._buffer)[self._stop :])

    async def _receive_into(self, into: memoryview) -> int:
        received = await self._read_into(into)
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        if self.stall is not None:
            self.stall.arrived()
        return received


def notice_dead_host(sock: socket.socket, *, idle_s: int, every_s: int, num_probes: int) -> None:
    """End the connection of a machine that vanished: probe after `idle_s` of silence."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, num_probes)


def _framed(word: Word) -> bytes:
    body = _encoder.encode(word)
    return _LENGTH.pack(len(body)) + body
