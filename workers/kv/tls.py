"""Connections that carry a pull over TLS."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from baton.peer_tls import PeerTls
from baton.tls import peers_fault
from workers.kv.wire import Connection

T = TypeVar("T")


def accepted(sock: socket.socket, tls: PeerTls | None) -> Connection:
    """The source's end of a connection, not open; it owns the socket. Raises OSError."""
    if tls is None:
        return Connection(sock)
    wrapped = tls.accepting.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    return TlsConnection(wrapped)


def called(sock: socket.socket, tls: PeerTls | None) -> Connection:
    """The puller's end, likewise."""
    if tls is None:
        return Connection(sock)
    return TlsConnection(tls.connecting.wrap_socket(sock, do_handshake_on_connect=False))


class TlsConnection(Connection):
    """A Connection whose socket is an SSLSocket, which event loops cannot read from themselves."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock

    async def open(self) -> None:
        """Shake hands. Raises OSError; ConnectionError, with a sentence, if the peer cannot be trusted."""
        await self._done(self._tls.do_handshake)

    async def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[await self._done(self._tls.send, rest) :]

    async def _read_into(self, into: memoryview) -> int:
        """What has arrived: TLS gives only 16 KiB at a time."""
        num_read = await self._done(self._tls.recv_into, into)
        while 0 < num_read < len(into):
            try:
                num_more = self._tls.recv_into(into[num_read:])
            except ssl.SSLWantReadError:
                break
            if num_more == 0:
                break  # which the next read tells
            num_read += num_more
        return num_read

    async def _done(self, act: Callable[..., T], *arguments: object) -> T:
        """The result of a call of the socket, when it does not have to wait any more."""
        while True:
            try:
                return act(*arguments)
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except ssl.SSLEOFError as error:
                raise ConnectionResetError("the peer closed the connection") from error
            except ssl.SSLError as error:
                raise ConnectionError(peers_fault(error)) from error

    async def _ready(self, watch: Callable[..., object], forget: Callable[..., object]) -> None:
        woken = asyncio.Event()
        watch(self._tls, woken.set)
        try:
            await woken.wait()
        finally:
            forget(self._tls)
