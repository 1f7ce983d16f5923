"""The messages between the two ends of a pull, and exact reads and writes on a nonblocking socket.

    puller                      source
    Ask(offer, secret)   ->
                         <-     Grant(words), or Refused
           (the bytes move: streamed over this socket, or read out of the source's memory)
    Fetched              ->
                         <-     Stands, or the end of the connection: only now do the bytes count

The last exchange makes withdrawal safe: bytes read from memory that was withdrawn meanwhile are discarded.
The end of the connection tells each side at once that the other is lost.
"""

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from baton.errors import HandoffFailed

_LENGTH = struct.Struct("<I")
_MAX_WORD_BYTES = 64 * 1024
# Copy at most this much per turn of the event loop: about 0.1 ms.
_SLICE_BYTES = 256 * 1024


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
    """The offer stood until the puller finished: the bytes are valid."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The puller gets no bytes, with the reason."""

    reason: str


Word = Ask | Grant | Fetched | Stands | Refused
_W = TypeVar("_W", Ask, Grant, Fetched, Stands)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


async def send_word(sock: socket.socket, word: Word) -> None:
    """Send one message. Raises OSError if the peer is lost."""
    body = _encoder.encode(word)
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(body)) + body)


async def receive_word(sock: socket.socket, expected: type[_W]) -> _W:
    """Receive one message of the expected type.

    Raises HandoffFailed for a Refused, OSError if the peer is lost or sends garbage.
    """
    length = bytearray(_LENGTH.size)
    await receive_bytes(sock, memoryview(length))
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > _MAX_WORD_BYTES:
        raise ConnectionError(f"a message of {num_bytes} bytes exceeds {_MAX_WORD_BYTES}")
    body = bytearray(num_bytes)
    await receive_bytes(sock, memoryview(body))
    try:
        word = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a message of this protocol: {error}") from error
    if isinstance(word, Refused):
        raise HandoffFailed(word.reason)
    if not isinstance(word, expected):
        raise ConnectionError(f"got {type(word).__name__} instead of {expected.__name__}")
    return word


async def receive_bytes(sock: socket.socket, into: memoryview) -> None:
    """Fill `into` from the socket without a copy. Raises OSError if the peer is lost."""
    loop = asyncio.get_running_loop()
    done = 0
    while done < len(into):
        received = await loop.sock_recv_into(sock, into[done : done + _SLICE_BYTES])
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        done += received
        if received > _LENGTH.size:
            await asyncio.sleep(0)  # sock_recv_into does not suspend while data is available


async def send_bytes(sock: socket.socket, payload: memoryview) -> None:
    """Send all of `payload` without a copy. Raises OSError if the peer is lost."""
    loop = asyncio.get_running_loop()
    for start in range(0, len(payload), _SLICE_BYTES):
        await loop.sock_sendall(sock, payload[start : start + _SLICE_BYTES])
        await asyncio.sleep(0)  # sock_sendall does not suspend while there is room
