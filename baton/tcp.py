"""The request plane over TCP: one connection per pair of caller and worker, length-prefixed frames."""

import asyncio
import contextlib
import functools
import os
import secrets
import socket
import ssl
import struct
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

from baton import frames
from baton.errors import WorkerLost
from baton.listener import ConnectionLimit, Listener, num_connections
from baton.pace import LIVENESS_S
from baton.peer_tls import CERT, PeerDistrusted, PeerTls
from baton.streams import CLOSED, MAX_CALLERS, CallerLink, Plane, Service, WorkerLink
from baton.telemetry import unauthenticated
from baton.tls import peers_fault
from baton.transport import Respond

CONNECT_TIMEOUT_S = 3.0
CLOSE_S = 1.0
"""How long a closed connection may keep sending its buffer."""
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]
"""Connects to a worker, given what makes the protocol of the connection."""
_TURNED_AWAY = 64
_UNLIKE = {
    "tcp": f"does not use TLS, and this process does ({CERT})",
    "tls": f"uses TLS, and this process does not ({CERT} is not set)",
}
_HUNG_UP = "it closed the connection after this process's certificate; see its log"
_HIGH_WATER_BYTES = 1024 * 1024
"""With more than this unsent, generators wait; the frame of one turn may exceed it."""


class TcpTransport(Plane):
    """`Transport` over TCP; addresses are `tcp://HOST:PORT/WORKER.TOKEN`, with a new token each time, and
    `tls://` with `tls`. A process of one kind does not connect to one of the other.

    `serve` listens on a free port of `host`, which callers connect to. A worker that is silent for
    `liveness_s` is lost."""

    def __init__(
        self, *, host: str = "127.0.0.1", liveness_s: float = LIVENESS_S, tls: PeerTls | None = None
    ) -> None:
        super().__init__(liveness_s)
        self._host = host
        self._tls = tls
        self._scheme = "tcp" if tls is None else "tls"
        self._connecting: set[asyncio.Task[None]] = set()
        self._sockets: set[asyncio.Future[None]] = set()

    @contextlib.asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:
        """`Transport.serve`. Raises OSError if `host` is not local."""
        listening, name, address = self._listen(worker_id)
        service, tls = Service(name, respond, self._pace), self._tls
        sockets: set[asyncio.Future[None]] = set()
        # A few more than the service admits, so that the surplus gets an error message.
        limit = ConnectionLimit(num_connections(4, MAX_CALLERS + _TURNED_AWAY), TcpWire.evict)

        def take(sock: socket.socket) -> TcpWire | None:
            wire = TcpWire(sockets, limit=limit, handshaking=None if tls is None else sock)
            if not self._may_call(sock) or not limit.enter(wire):
                sock.close()
                return None
            wire.link = WorkerLink(wire, service)
            return wire

        context = (lambda: None) if tls is None else (lambda: tls.accepting)
        listener = Listener(listening, take, limit.make_room, context)
        try:
            yield address
        finally:
            listener.close()
            await service.stop()
            await _all_closed(sockets)

    is_reachable = True
    """`Transport.is_reachable`; workers are reached one by one."""

    async def reachable(self) -> None:
        """`Transport.reachable`."""

    async def close(self) -> None:
        self._closed = True
        self._lose_all(CLOSED)
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await _all_closed(self._sockets)

    async def _connect(self, address: str) -> CallerLink:
        if self._closed:
            raise WorkerLost(CLOSED)
        worker, where, connect = self._target(address)
        connection = TcpWire(self._sockets, forget=functools.partial(self._links.pop, address, None))
        link = self._links[address] = connection.link = CallerLink(connection, worker, self._pace)
        task = asyncio.get_running_loop().create_task(_connect(connection, link, where, connect))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return link

    def _listen(self, worker_id: str) -> tuple[socket.socket, str, str]:
        """A listening socket, and the worker's name and address there."""
        host = self._host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=MAX_CALLERS)
        # Accepted sockets inherit it; asyncio sets it only on those that it connects.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"{urllib.parse.quote(worker_id, safe='')}.{secrets.token_hex(16)}"
        where = f"[{host}]" if ":" in host else host
        return sock, name, f"{self._scheme}://{where}:{sock.getsockname()[1]}/{name}"

    def _may_call(self, sock: socket.socket) -> bool:  # noqa: ARG002  callers show a name
        return True

    def _target(self, address: str) -> tuple[str, str, Connect]:
        """The worker at an address, the place for messages, and how to connect to it. Raises PeerDistrusted
        if only one side has TLS; WorkerLost if it is not a TCP worker address."""
        try:
            url = urllib.parse.urlsplit(address)
            host, port, scheme = url.hostname, url.port, url.scheme
        except ValueError:
            host = port = scheme = None
        if scheme not in _UNLIKE or not host or not port:
            raise WorkerLost(f"{address!r} is not a TCP worker address")
        if scheme != self._scheme:
            raise PeerDistrusted(f"{host}:{port} {_UNLIKE[scheme]}")
        context = None if self._tls is None else self._tls.connecting
        create = asyncio.get_running_loop().create_connection
        connect = functools.partial(create, host=host, port=port, ssl=context)
        return url.path.removeprefix("/"), f"{host}:{port}", connect


class TcpWire(asyncio.Protocol):
    """One socket: the Wire of its link. Data sent before it is connected waits. `handshaking` is an accepted
    socket that is not connected before the TLS handshake."""

    max_frame_bytes = frames.MAX_FRAME_BYTES

    link: CallerLink | WorkerLink

    def __init__(
        self,
        sockets: set[asyncio.Future[None]],
        forget: Callable[[], object] = lambda: None,
        limit: "ConnectionLimit[TcpWire] | None" = None,
        handshaking: socket.socket | None = None,
    ) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._forget = forget
        self._limit = limit
        self._handshaking = handshaking
        self._is_heard = False
        self._splitter = frames.Splitter(frames.MAX_FRAME_BYTES if limit is None else frames.MAX_HELLO_BYTES)
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._closing = False
        self._gone: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # uvloop's transport is one in all but type
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._transport = transport
        self._handshaking = None
        self._sockets.add(self._gone)
        transport.writelines(self._early)
        self._early.clear()
        if self._closing:
            self._hang_up(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self.link.receive(frame)
                if not self._is_heard:  # it was valid, or the link is lost
                    self._is_heard = True
                    if self._limit is not None and not self._closing:
                        self._limit.busy(self)
        except frames.LinkBroken as broken:
            if not self._is_heard and self._limit is not None:
                unauthenticated.note("the request plane")
            self.link.lose(str(broken))

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer's process ended, or one side closed the connection."""
        self._sockets.discard(self._gone)
        if self._limit is not None:
            self._limit.leave(self)
        self._gone.set_result(None)
        if isinstance(exc, ssl.SSLError) and self._handshaking is not None:
            unauthenticated.note(f"the request plane: TLS with a caller failed: {peers_fault(exc)}")
        why = f"the connection broke: {exc}" if exc else "the connection was closed"
        has_shaken = self._transport is not None and self._transport.get_extra_info("ssl_object") is not None
        if isinstance(self.link, CallerLink) and has_shaken and not self._is_heard:
            self.link.lose(peers_fault(exc) if isinstance(exc, ssl.SSLError) else _HUNG_UP, PeerDistrusted)
        else:
            self.link.lose(why)

    def send(self, frame: bytes) -> None:
        if self._transport is None:
            self._early.append(frames.with_length(frame))
        elif not self._transport.is_closing():
            self._transport.write(frames.with_length(frame))

    def close(self) -> None:
        self._closing = True
        self.writable.set()
        self._forget()
        if self._transport is not None:
            self._hang_up(self._transport)
        elif self._handshaking is not None:
            with contextlib.suppress(OSError):
                self._handshaking.shutdown(socket.SHUT_RDWR)  # which ends the handshake

    def evict(self) -> None:
        self.link.lose("it sent no Hello and others are waiting for a connection")

    def _hang_up(self, transport: asyncio.Transport) -> None:
        transport.close()
        abort = self._loop.call_later(CLOSE_S, transport.abort)
        self._gone.add_done_callback(lambda _: abort.cancel())


async def _connect(connection: TcpWire, link: CallerLink, where: str, connect: Connect) -> None:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connect(lambda: connection)
    except TimeoutError:
        link.lose(f"{where} did not accept the connection within {CONNECT_TIMEOUT_S} s")
    except ssl.SSLError as error:
        link.lose(f"{where} is not trusted: {peers_fault(error)}", PeerDistrusted)
    except (OSError, ValueError, OverflowError) as error:  # no host may have such a name
        link.lose(f"cannot connect to {where}: {error}")


async def _all_closed(sockets: set[asyncio.Future[None]]) -> None:
    if sockets:
        await asyncio.wait(set(sockets), timeout=2 * CLOSE_S)


_SCHEME = "unix:@"


class UnixTransport(TcpTransport):
    """`Transport` over abstract Unix sockets (Linux); addresses are `unix:@WORKER`. It connects processes of
    one user in one network namespace."""

    def address(self, worker_id: str) -> str:
        """Where a worker of that id is served."""
        return _SCHEME + worker_id

    def _listen(self, worker_id: str) -> tuple[socket.socket, str, str]:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(f"\0{worker_id}")
            sock.listen()
        except OSError:
            sock.close()
            raise
        return sock, worker_id, self.address(worker_id)

    def _may_call(self, sock: socket.socket) -> bool:
        return is_own(sock)

    def _target(self, address: str) -> tuple[str, str, Connect]:
        worker = address.removeprefix(_SCHEME)
        if worker == address:
            raise WorkerLost(f"{address!r} is not the address of a Unix socket")

        async def connect(protocol: Callable[[], asyncio.Protocol]) -> None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.setblocking(False)
                sock.connect(f"\0{worker}")
                if not is_own(sock):
                    raise PermissionError("another user's process has this name")
                await asyncio.get_running_loop().create_unix_connection(protocol, sock=sock)
            except OSError:
                sock.close()
                raise

        return worker, address, connect


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
