"""The words the two ends of a pull exchange, and exact reads and writes on a nonblocking socket.

    puller                      source
    Ask(offer, secret)   ->
                         <-     Grant(words), or Refused
           (the bytes move: streamed over this socket, or read out of the source's memory)
    Fetched              ->
                         <-     Stands, or the end of the connection: only now do the bytes count

The last exchange is what makes withdrawal safe: whatever was read of memory that the source has taken back
in the meantime is thrown away. A connection that ends tells each side at once that the other is gone.
"""

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from baton.errors import HandoffFailed

_LENGTH = struct.Struct("<I")
_MAX_WORD_BYTES = 64 * 1024
# One turn of the event loop copies no more than this: about 0.1 ms.
_SLICE_BYTES = 256 * 1024


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The puller's first word; the secret comes from the ticket.

    `direct`: the puller reads the source's memory by itself; else the bytes follow the Grant on this socket.
    """

    offer_id: int
    secret: bytes
    direct: bool


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """The offer stands. `words`, of a direct wire, tell where and how to read it."""

    words: bytes = b""


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The puller holds every byte and reads no more."""


class Stands(msgspec.Struct, frozen=True, array_like=True, tag="stands"):
    """The offer stood until the puller was done: the bytes are good."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """No bytes for the puller, and why."""

    reason: str


Word = Ask | Grant | Fetched | Stands | Refused
_W = TypeVar("_W", Ask, Grant, Fetched, Stands)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Word)


async def send_word(sock: socket.socket, word: Word) -> None:
    """Send one word. Raises OSError when the peer is gone."""
    body = _encoder.encode(word)
    await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(body)) + body)


async def receive_word(sock: socket.socket, expected: type[_W]) -> _W:
    """Receive one word of the expected type.

    Raises HandoffFailed when it is Refused, OSError when the peer is gone or talks nonsense.
    """
    length = bytearray(_LENGTH.size)
    await receive_bytes(sock, memoryview(length))
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > _MAX_WORD_BYTES:
        raise ConnectionError(f"a word of {num_bytes} bytes, more than {_MAX_WORD_BYTES}")
    body = bytearray(num_bytes)
    await receive_bytes(sock, memoryview(body))
    try:
        word = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionError(f"not a word of this wire: {error}") from error
    if isinstance(word, Refused):
        raise HandoffFailed(word.reason)
    if not isinstance(word, expected):
        raise ConnectionError(f"{type(word).__name__} came instead of {expected.__name__}")
    return word


async def receive_bytes(sock: socket.socket, into: memoryview) -> None:
    """Fill `into` from the socket, without a copy. Raises OSError when the peer is gone."""
    loop = asyncio.get_running_loop()
    done = 0
    while done < len(into):
        received = await loop.sock_recv_into(sock, into[done : done + _SLICE_BYTES])
        if received == 0:
            raise ConnectionResetError("the peer closed the connection")
        done += received
        if received > _LENGTH.size:
            await asyncio.sleep(0)  # sock_recv_into does not suspend while bytes are there


async def send_bytes(sock: socket.socket, payload: memoryview) -> None:
    """Send all of `payload`, without a copy. Raises OSError when the peer is gone."""
    loop = asyncio.get_running_loop()
    for start in range(0, len(payload), _SLICE_BYTES):
        await loop.sock_sendall(sock, payload[start : start + _SLICE_BYTES])
        await asyncio.sleep(0)  # nor does sock_sendall while there is room
