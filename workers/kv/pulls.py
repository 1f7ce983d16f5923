"""The puller's end of a pull: request, deadline, and errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from baton.errors import HandoffFailed, HandoffStalled
from baton.messages import UNDECODABLE
from baton.peer_tls import PeerTls
from workers.kv.connections import Connections, Place
from workers.kv.memory import Memory, host_view
from workers.kv.source import Peer
from workers.kv.stall import STALL_S, Stall, stalling
from workers.kv.transceiver import Ticket
from workers.kv.wire import Ask, Connection, Fetched, Grant, Stands

Fetch = Callable[[Ticket, Memory], Awaitable[None]]
"""Fetches the bytes; once it returns or raises, the memory is not written any more."""


class Pulls:
    """The running pulls of a transceiver of kind `wire`."""

    def __init__(self, wire: str, fetch: Fetch | None = None, tls: PeerTls | None = None) -> None:
        self._wire = wire
        self._fetch = fetch or self.fetch_stream
        self._connections = Connections(tls)
        self._running: set[asyncio.Future[None]] = set()
        self._closed = False

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """See CacheTransceiver.pull."""
        if ticket.wire != self._wire:
            raise HandoffFailed(f"the KV is offered over {ticket.wire}, this worker uses {self._wire}")
        if not 1 <= into.num_bytes <= ticket.num_bytes:
            raise ValueError(f"{ticket.num_bytes} bytes are offered, but the target has {into.num_bytes}")
        if self._closed:
            raise HandoffFailed("the transceiver is closed")
        task = asyncio.ensure_future(self._fetch(ticket, into))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async with asyncio.timeout(deadline_s):
                await task
        except TimeoutError:
            raise HandoffFailed(f"the KV did not arrive within {deadline_s:g} s") from None
        except (OSError, *UNDECODABLE) as error:
            raise HandoffFailed(f"the source of the KV was lost: {error}") from error
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise HandoffFailed("the transceiver was closed during the pull") from None

    async def close(self) -> None:
        """End every pull with HandoffFailed."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._connections.close()

    async def fetch_stream(self, ticket: Ticket, into: Memory) -> None:
        """Fetch an offer over the socket into host memory. Raises like `asking`."""
        async with self.asking(ticket, into.num_bytes, direct=False) as (connection, _, _):
            await connection.receive_bytes(host_view(into))
            await connection.receive(Stands)
            await connection.send(Fetched())

    @asynccontextmanager
    async def asking(
        self, ticket: Ticket, num_bytes: int, *, direct: bool
    ) -> AsyncIterator[tuple[Connection, Grant, Stall]]:
        """Ask for an offer's last `num_bytes`; fetch and confirm them inside the context.

        Raises HandoffFailed if the source refuses, HandoffStalled if nothing arrives for STALL_S, OSError if
        the source is lost.
        """
        peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
        place, ask = (peer.host, peer.port), Ask(ticket.offer_id, peer.secret, num_bytes, direct)
        try:
            async with stalling() as stall:
                connection, grant = await self._granted(place, ask, stall)
                try:
                    yield connection, grant, stall
                except BaseException:  # re-raised: the source sees at once that this pull has failed
                    connection.close()
                    raise
        except TimeoutError:  # ours, or the kernel's ETIMEDOUT
            stalled = f"nothing came from the source of the KV at {peer.host}:{peer.port} for {STALL_S:g} s"
            raise HandoffStalled(stalled) from None
        self._connections.keep(place, connection)

    async def _granted(self, place: Place, ask: Ask, stall: Stall) -> tuple[Connection, Grant]:
        kept = self._connections.kept(place)
        if kept is not None:
            try:
                return kept, await _grant(kept, ask, stall)
            except OSError:
                pass  # the source has closed it, to make room
        connection = await self._connections.new(place)
        return connection, await _grant(connection, ask, stall)


async def _grant(connection: Connection, ask: Ask, stall: Stall) -> Grant:
    connection.stall = stall
    try:
        await connection.send(ask)
        return await connection.receive(Grant)
    except BaseException:  # re-raised after its descriptor is released
        connection.close()
        raise
