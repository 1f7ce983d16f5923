"""KV bytes over a socket of their own, plain or with TLS; few bytes travel with the grant instead."""

import asyncio
import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from baton.errors import HandoffFailed, HandoffStalled
from baton.listener import ConnectionLimit, Listener, Tls
from baton.messages import KvGrant
from baton.peer_tls import PeerTls
from baton.telemetry import unauthenticated
from workers.kv.memory import Memory, host_view

STALL_S = 2.0
"""A pull fails when no byte arrives for this long, however much is left of its time."""
# Silence is counted in ticks: a process that stood still first reads what has arrived meanwhile.
_TICKS = 8
# As fast over the request plane as over a new socket; over TLS, which shakes hands first, faster.
_SMALL_BYTES = 128 * 1024
# Copy at most this much per turn of the event loop: about 0.1 ms.
_SLICE_BYTES = 256 * 1024
_TOKEN_BYTES = 16
# One reader is expected; connections that send no token make room.
_MOST_READERS = 16


class Stream:
    """Host memory's road, from a socket on `host`, which readers must reach."""

    def __init__(self, host: str, tls: PeerTls | None = None) -> None:
        self._host = host
        self._tls = tls
        self._accepting: Tls = (lambda: None) if tls is None else (lambda: tls.accepting)

    @asynccontextmanager
    async def lend(self, payload: Memory) -> AsyncIterator[KvGrant]:
        """Give one reader these bytes while the context is open. Raises OSError."""
        if payload.num_bytes <= _SMALL_BYTES:
            yield KvGrant(bytes(host_view(payload)))
            return
        token, writers = secrets.token_bytes(_TOKEN_BYTES), set[asyncio.StreamWriter]()
        readers = ConnectionLimit[asyncio.StreamWriter](_MOST_READERS, lambda each: each.transport.abort())
        is_open = True

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            try:
                if not is_open or not readers.enter(writer):
                    writer.transport.abort()
                elif hmac.compare_digest(await reader.readexactly(_TOKEN_BYTES), token):
                    readers.busy(writer)
                    await _send(payload, writer)
                else:
                    unauthenticated.note("the KV socket")
            except (OSError, asyncio.IncompleteReadError):
                pass  # the reader closed the connection
            finally:
                readers.leave(writer)
                await _close(writer)
                writers.discard(writer)  # asyncio cannot abort what it has flushed and closed

        def take(_: socket.socket) -> asyncio.Protocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), serve)

        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, 0), family=family)
        # Asyncio's own server leaks what it accepted in the turn in which it is closed.
        listener = Listener(sock, take, readers.make_room, self._accepting)
        try:
            yield KvGrant(port=sock.getsockname()[1], token=token)
        finally:
            is_open = False
            listener.close()
            for writer in writers:
                writer.transport.abort()

    async def fetch(self, address: str, grant: KvGrant, into: Memory) -> None:
        """Fill `into` from the source's host. Raises HandoffStalled, OSError if the source is lost."""
        host, view = urlsplit(address).hostname, host_view(into)
        if not grant.port:
            if len(grant.payload) != into.num_bytes:
                raise HandoffFailed(f"{len(grant.payload)} bytes came instead of {into.num_bytes}")
            view[:] = grant.payload
            return
        tls = None if self._tls is None else self._tls.connecting
        try:
            async with asyncio.timeout(STALL_S):
                reader, writer = await asyncio.open_connection(host, grant.port, ssl=tls, limit=_SLICE_BYTES)
        except TimeoutError:
            raise HandoffStalled(
                f"{host}:{grant.port} did not accept a connection in {STALL_S:g} s"
            ) from None
        try:
            writer.write(grant.token)
            while view:
                piece = await _read(reader, min(len(view), _SLICE_BYTES))
                view[: len(piece)] = piece
                view = view[len(piece) :]
        finally:
            writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _send(payload: Memory, writer: asyncio.StreamWriter) -> None:
    view = host_view(payload)
    for start in range(0, len(view), _SLICE_BYTES):
        writer.write(view[start : start + _SLICE_BYTES])
        await writer.drain()
        await asyncio.sleep(0)  # draining does not suspend while there is room


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """The next bytes. Raises HandoffStalled, ConnectionResetError."""
    for _ in range(_TICKS):
        with suppress(TimeoutError):
            async with asyncio.timeout(STALL_S / _TICKS):
                if piece := await reader.read(max_bytes):
                    return piece
            raise ConnectionResetError("the source closed the connection")
    raise HandoffStalled(f"no byte of the KV came for {STALL_S:g} s")
