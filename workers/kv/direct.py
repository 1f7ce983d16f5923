"""KV bytes over UCX: the reader reads the source's memory itself, at link speed."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from baton.messages import KvGrant
from workers.kv.memory import Memory, NoDirectPath
from workers.kv.ucx import Agent, Reach

T = TypeVar("T")

log = logging.getLogger(__name__)

# How long an abandoned read may take to end.
_GRACE_S = 0.5
MAX_PEERS = 64
# A GPU's read takes 0.02 to 3 ms and advances only when polled, so poll without pauses at first: with pauses
# of 0.1 ms, 1 GiB took 3.9 ms instead of 2.7 (H200s). Longer reads wait for the peer.
_EAGER_S = 5e-3
_PAUSE_S = 100e-6


class _Read(msgspec.Struct, eq=False):
    """One read into `into`, until it is complete or nobody waits for it any more."""

    source: str
    reach: Reach
    into: Memory
    give_up_at: float = float("inf")
    handle: Any = None


class _Peer:
    """A source, by its address, with its own agent, which can be closed with its reads.

    Nothing less stops a hanging read: after releasing its handle and disconnecting, UCX still wrote when the
    source woke up (measured). Reconnecting one agent leaked two file descriptors per side each time.

    NIXL's agent lives as long as one of its handles: only `reads` may hold these, no variable, no traceback.
    """

    def __init__(self, host: str, source: str) -> None:
        self.agent = Agent(host)
        self.source = source
        self.reads: list[_Read] = []
        self.error: OSError | None = None

    def close(self, error: OSError) -> None:
        """End every read with `error`; none of them writes after that."""
        self.error = error
        while self.reads:
            self.end(self.reads[-1])
        self.agent.close()

    def end(self, read: _Read) -> None:
        self.reads.remove(read)
        self.agent.release(read.handle)
        read.handle = None


class Direct:
    """A road for host and CUDA memory. `fetch` raises NoDirectPath if UCX cannot read the source's.
    `has_link`: whether the process at an address is connected; sources that are not have ended.

    UCX has a thread of its own, whose event loop polls only while there is work: UCX sends no notifications.
    """

    def __init__(self, host: str) -> None:
        """Raises OSError with the reason if this machine cannot run UCX."""
        Agent(host).close()
        self.has_link: Callable[[str], bool] = lambda _: True
        self._host = host
        self._loop: asyncio.AbstractEventLoop  # while running
        self._source: Agent | None = None
        self._peers: dict[str, _Peer] = {}  # by the agent's name
        self._eager_until = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run UCX during the context. Raises OSError."""
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="kv-ucx", daemon=True)
        thread.start()
        try:
            await self._on_thread(self._open())
            yield
        finally:
            await self._on_thread(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(thread.join)
            self._loop.close()

    @asynccontextmanager
    async def lend(self, payload: Memory) -> AsyncIterator[KvGrant]:
        """Let one reader read this memory while the context is open; the grant's payload is a Reach."""
        reach = await self._on_thread(self._register(payload))
        connecting = self._on_thread(self._progress())
        try:
            yield KvGrant(msgspec.msgpack.encode(reach))
        finally:
            connecting.cancel()

    async def fetch(self, address: str, grant: KvGrant, into: Memory) -> None:
        """Read the source's memory. After it returns or raises, `into` is not written."""
        read = _Read(address, msgspec.msgpack.decode(grant.payload, type=Reach), into)
        ended = self._on_thread(self._read(read))
        try:
            await asyncio.wait({ended})
        finally:
            if not ended.done():
                read.give_up_at = time.monotonic() + _GRACE_S
                await asyncio.wait({ended})
            error = ended.exception()  # retrieved, even if cancelled
        if error is not None:
            raise error

    def _on_thread(self, work: Coroutine[None, None, T]) -> "asyncio.Future[T]":
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # The rest runs on the thread.

    async def _open(self) -> None:
        self._source = Agent(self._host)

    async def _close(self) -> None:
        for name in tuple(self._peers):
            self._lose(name, ConnectionAbortedError("the transceiver was closed"))
        if self._source is not None:
            self._source.close()
            self._source = None
        if ending := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(ending)

    async def _register(self, payload: Memory) -> Reach:
        if self._source is None:
            raise OSError("UCX is closed")
        return self._source.reach(payload)

    async def _progress(self) -> None:
        while self._source is not None:
            self._source.progress()
            await self._pause()

    async def _read(self, read: _Read) -> None:
        name = read.reach.agent
        peer = self._peers.get(name) or self._meet(name, read.source)
        self._eager_until = time.monotonic() + _EAGER_S
        try:
            await self._complete(peer, read)
        except Exception as error:  # noqa: BLE001  the reader gets any error
            kind = NoDirectPath if isinstance(error, NoDirectPath) else ConnectionAbortedError
            reason = str(error) if isinstance(error, OSError) else repr(error)
        else:
            return
        # Only now is that error's traceback gone, which may hold NIXL's agent.
        if peer.error is None:
            self._lose(name, kind(reason))
        raise kind(reason)

    async def _complete(self, peer: _Peer, read: _Read) -> None:
        read.handle = peer.agent.read(read.reach, read.into)
        peer.reads.append(read)
        while not peer.agent.is_done(read.handle):
            if time.monotonic() > read.give_up_at:
                log.warning("ucx read aborted source=%s reason=hung", read.reach.agent)
                raise ConnectionAbortedError("a read from this source hung")
            await self._pause()
            if peer.error is not None:
                raise type(peer.error)(*peer.error.args)
        peer.end(read)

    def _meet(self, name: str, source: str) -> _Peer:
        if self._source is None:
            raise ConnectionAbortedError("the transceiver was closed")
        idle = [each for each, peer in self._peers.items() if not peer.reads]
        # Each holds nine descriptors and 4 MiB of shared memory.
        useless = [each for each in idle if not self.has_link(self._peers[each].source)]
        if not useless and len(self._peers) >= MAX_PEERS:
            useless = idle[:1]
        for each in useless:
            self._lose(each, ConnectionAbortedError("it was idle"))
        peer = self._peers[name] = _Peer(self._host, source)
        return peer

    def _lose(self, name: str, error: OSError) -> None:
        self._peers.pop(name).close(error)

    async def _pause(self) -> None:
        """Let the others poll, too."""
        if time.monotonic() > self._eager_until:
            time.sleep(_PAUSE_S)  # noqa: ASYNC251  the loop's own timers are coarser: 1 ms
        await asyncio.sleep(0)
