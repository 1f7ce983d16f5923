"""A puller's connections to its sources, kept for the next pull."""

import asyncio
import socket
from collections import defaultdict

from baton.peer_tls import PeerTls
from workers.kv.tls import called
from workers.kv.wire import Connection, notice_dead_host

IDLE_S = 60.0
"""How long an unused connection is kept."""

Place = tuple[str, int]
"""Host and port of a source."""


class Connections:
    """Idle connections by source; each serves one pull at a time."""

    def __init__(self, tls: PeerTls | None = None) -> None:
        self._tls = tls
        self._idle: defaultdict[Place, list[Connection]] = defaultdict(list)
        self._timers: dict[Connection, asyncio.TimerHandle] = {}

    def kept(self, place: Place) -> Connection | None:
        """An idle connection; its source may have hung up."""
        if not (connections := self._idle.get(place)):
            return None
        connection = connections[-1]  # so that those beyond need expire
        self._forget(place, connection)
        return connection

    async def new(self, place: Place) -> Connection:
        """A new connection. Raises OSError."""
        sock = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A direct read sends nothing over this socket, so that only probes show a cut network.
            notice_dead_host(sock, idle_s=1, every_s=1, num_probes=2)
            await asyncio.get_running_loop().sock_connect(sock, place)
            connection = called(sock, self._tls)
        except BaseException as error:  # re-raised after its descriptor is released
            sock.close()
            if isinstance(error, ValueError | OverflowError):
                raise OSError(f"{place} is no address: {error}") from error
            raise
        try:
            await connection.open()
        except BaseException:  # re-raised after its descriptor is released
            connection.close()
            raise
        return connection

    def keep(self, place: Place, connection: Connection) -> None:
        """Keep a connection that has served a pull."""
        self._idle[place].append(connection)
        loop = asyncio.get_running_loop()
        self._timers[connection] = loop.call_later(IDLE_S, self._expire, place, connection)

    def close(self) -> None:
        """Close the idle connections."""
        for place, connections in tuple(self._idle.items()):
            for connection in tuple(connections):
                self._expire(place, connection)

    def _expire(self, place: Place, connection: Connection) -> None:
        self._forget(place, connection)
        connection.close()

    def _forget(self, place: Place, connection: Connection) -> None:
        self._timers.pop(connection).cancel()
        self._idle[place].remove(connection)
        if not self._idle[place]:
            del self._idle[place]
