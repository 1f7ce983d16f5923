"""Accepting connections: bounded by the open-file limit; idle connections make room for new ones."""

import asyncio
import errno
import logging
import resource
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65_536
"""The soft limit that a process sets at start, if its hard limit allows."""
_ACCEPTS_A_TURN = 16
_MOST_LAST_ACCEPTS = 4096
_PAUSE_S = 0.1
_PAUSE_PER_CONNECTION_S = 0.0001
"""On a shared socket, the pause before accepting: the process with the fewest connections is first."""
_MOST_SHARED_PAUSE_S = 0.005
_HANDSHAKE_S = 10.0
_GOODBYE_S = 2.0
_LOG_EVERY_S = 60.0


T = TypeVar("T")
Tls = Callable[[], ssl.SSLContext | None]
"""The context for a connection that was just accepted; None: without TLS."""
Take = Callable[[socket.socket], asyncio.Protocol | None]


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to MOST_DESCRIPTORS or the hard limit; shells often set 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_connections(part: int, at_most: int, *, reserve: int | None = None) -> int:
    """The connection limit for one listener: a `part`-th of this process's descriptors, or all but `reserve`
    if that is more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return at_most
    return min(at_most, max(soft // part, 0 if reserve is None else soft - reserve))


class ConnectionLimit(Generic[T]):
    """The connections of one listener, `limit` at most. When full, a new one replaces the one that has waited
    longest without a request, which `hang_up` closes."""

    def __init__(self, limit: int, hang_up: Callable[[T], None]) -> None:
        self._limit = limit
        self._hang_up = hang_up
        self._present: set[T] = set()
        self._waiting: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._present)

    def enter(self, connection: T) -> bool:
        """Admit a new, waiting connection; False if all `limit` connections are busy."""
        if len(self._present) >= self._limit and not self.make_room():
            return False
        self._present.add(connection)
        self._waiting[connection] = None
        return True

    def make_room(self) -> bool:
        """Close the connection that has waited longest; False if none is waiting."""
        if not self._waiting:
            return False
        connection, _ = self._waiting.popitem(last=False)
        self._hang_up(connection)
        return True

    def busy(self, connection: T) -> None:
        """Mark as served: it keeps its place."""
        self._waiting.pop(connection, None)

    def wait(self, connection: T) -> None:
        """Mark as waiting for its next request."""
        if connection in self._present:
            self._waiting[connection] = None

    def leave(self, connection: T) -> None:
        self._present.discard(connection)
        self._waiting.pop(connection, None)


class Listener:
    """Accepts on a listening socket. `take` gets each connection and keeps it, or returns the protocol that
    the event loop should run on it. `num_open`, for a socket on which other processes accept too, is how many
    connections this process has: the one with the fewest accepts first.

    The event loops' own servers do not survive running out of descriptors: uvloop closes the listening socket
    for good. This one calls `make_room` and tries again a moment later."""

    def __init__(
        self,
        listener: socket.socket,
        take: Take,
        make_room: Callable[[], object],
        tls: Tls = lambda: None,
        num_open: Callable[[], int] | None = None,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._take = take
        self._make_room = make_room
        self._tls = tls
        self._num_open = num_open
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._logged_s = -_LOG_EVERY_S
        self._listen()

    def close(self) -> None:
        """Accept the connections that wait, which closing would reset, then stop; accepted ones stay."""
        self._accept(_MOST_LAST_ACCEPTS)
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def settled(self) -> None:
        """Wait until all accepted connections are set up, except those stalled in the TLS handshake."""
        if self._connecting:
            _, late = await asyncio.wait(self._connecting, timeout=_GOODBYE_S)
            for task in late:
                task.cancel()

    def _listen(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._on_waiting)

    def _on_waiting(self) -> None:
        if self._num_open is None:
            self._accept(_ACCEPTS_A_TURN)
        else:
            self._pause(min(self._num_open() * _PAUSE_PER_CONNECTION_S, _MOST_SHARED_PAUSE_S))

    def _resume(self) -> None:
        self._listen()
        if self._num_open is not None:
            self._accept(1 + self._num_open() // 8)

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listener)
        if self._paused is not None:
            self._paused.cancel()
        self._paused = self._loop.call_later(pause_s, self._resume)

    def _accept(self, at_most: int) -> None:
        for _ in range(at_most):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._fail(error)
                return
            sock.setblocking(False)
            protocol = self._take(sock)
            if protocol is not None:
                task = self._loop.create_task(_connect(sock, protocol, self._tls()))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)

    def _fail(self, error: OSError) -> None:
        """Pause: pending connections keep the socket readable, so this would spin."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("accept=paused port=%d error=%s", self._listener.getsockname()[1], error)
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            self._make_room()
        self._pause(_PAUSE_S)


async def _connect(sock: socket.socket, protocol: asyncio.Protocol, tls: ssl.SSLContext | None) -> None:
    limits = {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": _GOODBYE_S} if tls else {}
    try:
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: protocol, sock, ssl=tls, **limits)
    except OSError as error:
        protocol.connection_lost(error)
