"""The HTTP server: limits connections, enforces their timeouts, drains on shutdown."""

import asyncio
import logging
import socket

import uvicorn

from baton.errors import NotReady
from baton.listener import ConnectionLimit, Listener, Tls, num_connections
from baton.pace import Pulse
from frontend.http.connection import Connection, Patience
from frontend.http.errors import ErrorBody, error_headers
from frontend.http.exchange import AsgiApp, Exchange, Receive, Scope, Send

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16_384
RESERVED_DESCRIPTORS = 2048
"""For workers, files and connections that are turned away."""
MOST_TURNED_AWAY = 64
"""Connections beyond the limit that still get a 503; any more are closed without a response."""
_CHECK_EVERY_S = 1.0
_FULL = NotReady("The server has reached its connection limit; retry later.", retry_after_s=1)


class HttpServer:
    """Serves the app on a listening socket. By default, clients may use half of the process's file
    descriptors, or all but RESERVED_DESCRIPTORS.
    """

    def __init__(
        self,
        app: AsgiApp,
        drain_timeout_s: float,
        patience: Patience | None = None,
        max_connections: int | None = None,
        tls: Tls = lambda: None,
    ) -> None:
        self._server = _uvicorn(app, drain_timeout_s)
        self._patience = patience or Patience()
        most = max_connections or num_connections(2, MOST_CONNECTIONS, reserve=RESERVED_DESCRIPTORS)
        self._admitted = ConnectionLimit(most, Connection.evict)
        self._turned_away = ConnectionLimit(num_connections(8, MOST_TURNED_AWAY), Connection.evict)
        self._is_full = False
        self._tls = tls
        self._listener: Listener | None = None
        self._pulse: Pulse | None = None

    def start(self, listener: socket.socket, *, is_shared: bool = False) -> None:
        """Accept connections until `drain`; `is_shared`: other processes accept on the socket too."""
        num_open = self._admitted.__len__ if is_shared else None
        self._listener = Listener(listener, self._take, self._admitted.make_room, self._tls, num_open)
        self._pulse = Pulse(_CHECK_EVERY_S, self._check)

    async def drain(self) -> None:
        """Stop accepting connections, and let running answers finish within the drain timeout."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.settled()
        await self._server.shutdown()
        if self._pulse is not None:
            self._pulse.stop()

    def _take(self, sock: socket.socket) -> Connection | None:
        connection = Connection(self._server.config, self._server.server_state, self._patience, sock)
        connection.limit = self._admitted
        is_full = not self._admitted.enter(connection)
        if is_full != self._is_full:
            self._is_full = is_full
            log.warning("connections=%s", "full" if is_full else "room again")
        if is_full:
            connection.app, connection.limit = _turn_away, self._turned_away
            if not self._turned_away.enter(connection):
                sock.close()
                return None
        return connection

    def _check(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(self._server.server_state.connections):
            assert isinstance(connection, Connection), "the server creates only Connections"
            connection.check(now_s)


async def _turn_away(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    headers = [*error_headers(_FULL), (b"connection", b"close")]
    await exchange.answer(_FULL.status, ErrorBody.of(_FULL), headers)


def _uvicorn(app: AsgiApp, drain_timeout_s: float) -> uvicorn.Server:
    """Only uvicorn's shutdown is used; signals, sockets and timers are our own."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=int(drain_timeout_s),
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    server.servers = []
    return server
