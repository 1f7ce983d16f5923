"""The cache transceiver over UCX: the puller reads the source's memory directly, at link speed."""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from baton.errors import HandoffFailed
from workers.kv.fabric import Fabric, Read
from workers.kv.memory import Memory
from workers.kv.poller import Poller
from workers.kv.pulls import Pulls
from workers.kv.source import Peer, Source
from workers.kv.transceiver import Ticket
from workers.kv.ucx import NoDirectPath, Reach
from workers.kv.wire import Connection, Fetched, Grant, Stands

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 256


class DirectTransceiver:
    """Implements CacheTransceiver. Host memory that UCX cannot read directly is streamed instead."""

    moves_device_memory = True
    transport_name = "ucx"

    def __init__(self, host: str) -> None:
        """`host`: the address to listen on and to announce to pullers."""
        self._poller = Poller()
        self._fabric = Fabric(host, self._poller.submit)
        self._source = Source(self.transport_name, host, self._lend, on_moved=self._note)
        self._pulls = Pulls(self.transport_name, self._fetch)
        self._reaches: weakref.WeakKeyDictionary[Memory, Future[Reach]] = weakref.WeakKeyDictionary()
        self._no_path: set[tuple[str, int]] = set()
        self._paths: set[str] = set()

    @property
    def paths(self) -> str:
        """See CacheTransceiver. Between machines or CUDA devices UCX chooses the transport."""
        return ", ".join(sorted(self._paths))

    async def start(self) -> None:
        """See CacheTransceiver."""
        self._poller.start("kv-ucx", self._fabric.poll)
        try:
            await asyncio.wrap_future(self._poller.submit(self._fabric.open))
            await self._source.start()
        except BaseException:  # re-raised after its thread and port are released
            await self.close()
            raise

    def offer(self, payload: Memory) -> Ticket:
        """See CacheTransceiver."""
        ticket = self._source.offer(payload)
        # Register it while the ticket travels.
        self._reaches[payload] = self._poller.submit(self._fabric.reach, payload)
        return ticket

    async def moved(self, ticket: Ticket) -> int:
        """See CacheTransceiver."""
        return await self._source.moved(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """See CacheTransceiver."""
        self._source.withdraw(ticket)

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """See CacheTransceiver."""
        await self._pulls.pull(ticket, into, deadline_s)

    async def close(self) -> None:
        """See CacheTransceiver."""
        await self._pulls.close()
        await self._source.close()
        self._poller.submit(self._fabric.close)
        await asyncio.to_thread(self._poller.stop)

    @asynccontextmanager
    async def _lend(self, connection: Connection, payload: Memory, num_bytes: int) -> AsyncIterator[None]:
        self._poller.submit(self._fabric.lend)
        try:
            reach = await asyncio.wrap_future(self._reaches[payload])
            start = reach.address + payload.num_bytes - num_bytes
            reach = msgspec.structs.replace(reach, address=start)
            await connection.send(Grant(msgspec.msgpack.encode(reach)))
            yield
        finally:
            self._poller.submit(self._fabric.take_back)

    async def _fetch(self, ticket: Ticket, into: Memory) -> None:
        peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
        place = (peer.host, peer.port)
        if place in self._no_path and into.device_index is None:
            await self._stream(ticket, into)
            return
        try:
            async with self._pulls.asking(ticket, into.num_bytes, direct=True) as (connection, grant, stall):
                with stall.paused():  # nothing arrives here; the socket's probes notice a cut network
                    await self._read(connection, msgspec.msgpack.decode(grant.words, type=Reach), into)
                await connection.send(Fetched())
                await connection.receive(Stands)
            self._note(into, direct=True)
        except NoDirectPath as error:
            if into.device_index is not None:
                raise HandoffFailed(f"no direct path from the source to this CUDA device: {error}") from error
            await self._stream(ticket, into)
            log.warning("kv streamed peer=%s:%d reason=no direct path: %s", *place, error)
            if len(self._no_path) >= _MAX_REMEMBERED:
                self._no_path.clear()
            self._no_path.add(place)

    async def _stream(self, ticket: Ticket, into: Memory) -> None:
        await self._pulls.fetch_stream(ticket, into)
        self._note(into, direct=False)

    def _note(self, memory: Memory, direct: bool) -> None:
        self._paths.add(("cma" if memory.device_index is None else "cuda") if direct else "stream")

    async def _read(self, connection: Connection, reach: Reach, into: Memory) -> None:
        """Read the source's memory. Once it returns or raises, `into` is not written any more."""
        read = Read(reach, into)
        self._poller.submit(self._fabric.begin, read)
        ended = asyncio.wrap_future(read.ended)
        hung_up = asyncio.create_task(_hung_up(connection))
        both: set[asyncio.Future[Any]] = {ended, hung_up}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hung_up.cancel()
            if not ended.done():
                self._poller.submit(self._fabric.give_up, read)
            while not (ended.done() and hung_up.done()):
                with suppress(asyncio.CancelledError):  # pulled twice: already registering
                    await asyncio.wait(both)
            ended.exception()  # retrieved, even if another one is raised
        if not hung_up.cancelled() and (unreachable := hung_up.result()):
            raise unreachable
        ended.result()


async def _hung_up(connection: Connection) -> TimeoutError | None:
    """Return when the source withdrew the offer or died: it sends nothing else before Fetched. The error if
    it cannot be reached any more.
    """
    try:
        await asyncio.get_running_loop().sock_recv(connection.sock, 1)
    except TimeoutError as error:
        return error
    except OSError:
        pass
    return None
