"""KV bytes over UCX: the reader reads the source's memory itself, at link speed."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from workers.kv.memory import Memory
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
# New calls wait for the end of a slice of polling.
_SLICE_S = 1e-3


class Read:
    """One read into `into`. `ended` is set, to None or the error, after the last write."""

    def __init__(self, reach: Reach, into: Memory) -> None:
        self.reach = reach
        self.into = into
        self.ended: Future[None] = Future()
        self.handle: Any = None
        self.give_up_at = float("inf")


class _Peer:
    """A source, with its own agent, which can be dropped with its reads.

    Nothing less stops a hanging read: after releasing its handle and disconnecting, UCX still wrote when the
    source woke up (measured). Reconnecting one agent leaked two file descriptors per side each time.
    """

    def __init__(self, agent: Agent, epoch: int) -> None:
        self.agent = agent
        self.epoch = epoch
        self.reads: list[Read] = []

    def step(self, read: Read) -> bool:
        """Post or advance the read; True when it is complete. Raises NoDirectPath."""
        if read.handle is None:
            self.reads.append(read)
            read.handle = self.agent.read(read.reach, read.into)
        return self.agent.is_done(read.handle)

    def finish(self, read: Read) -> None:
        """Complete a read."""
        self.reads.remove(read)
        self.agent.release(read.handle)
        read.ended.set_result(None)

    def close(self, error: OSError) -> None:
        """End every read with `error`; none of them writes after that."""
        for read in self.reads:
            if read.handle is not None:
                self.agent.release(read.handle)
                read.handle = None
        self.agent.close()
        for read in self.reads:
            read.ended.set_exception(error)


class Fabric:
    """Lends memory to readers, and reads the memory of peers."""

    def __init__(self, host: str, max_peers: int = MAX_PEERS) -> None:
        self._host = host
        self._max_peers = max_peers
        self._num_lent = 0
        self._eager_until = 0.0
        self._waiting: list[Read] = []
        self._peers: dict[str, _Peer] = {}
        self._source: Agent | None = None

    def open(self) -> None:
        """Start UCX. Raises OSError."""
        self._source = Agent(self._host)

    def reach(self, payload: Memory) -> Reach:
        """Register `payload` and return how to read it. Raises OSError."""
        if self._source is None:
            raise OSError("UCX is closed")
        return self._source.reach(payload)

    def lend(self) -> None:
        """Serve a reader's connection until `take_back` has been called as often as this."""
        self._num_lent += 1

    def take_back(self) -> None:
        """One reader has ended."""
        self._num_lent -= 1

    def begin(self, read: Read) -> None:
        """Start a read; `read.ended` gets its result."""
        self._waiting.append(read)
        self._eager_until = time.monotonic() + _EAGER_S

    def give_up(self, read: Read) -> None:
        """Abandon a read, so that it ends soon."""
        read.give_up_at = min(read.give_up_at, time.monotonic() + _GRACE_S)

    def poll(self) -> float | None:
        """Advance all reads; returns the seconds until the next poll, None if idle."""
        if self._num_lent and self._source is not None:
            self._source.progress()
        for peer in tuple(self._peers.values()):
            for read in tuple(peer.reads):
                self._drive(peer, read)
        for read in tuple(self._waiting):
            self._start(read)
        if not (self._num_lent or self._waiting or any(peer.reads for peer in self._peers.values())):
            return None
        return 0 if time.monotonic() < self._eager_until else _PAUSE_S

    def close(self) -> None:
        """End every read and free the agents."""
        closed = ConnectionAbortedError("the transceiver was closed")
        for name in tuple(self._peers):
            self._lose(name, closed)
        for read in self._waiting:
            read.ended.set_exception(closed)
        self._waiting.clear()
        if self._source is not None:
            self._source.close()
            self._source = None

    def _start(self, read: Read) -> None:
        reach = read.reach
        peer = self._peers.get(reach.agent)
        if peer is not None and peer.epoch != reach.epoch:
            if peer.reads and time.monotonic() < read.give_up_at:
                return  # their registrations are still valid
            self._lose(reach.agent, ConnectionAbortedError("the source changed its registrations"))
            peer = None
        self._waiting.remove(read)
        try:
            peer = peer or self._meet(reach)
        except OSError as error:
            read.ended.set_exception(error)
        else:
            self._drive(peer, read)

    def _meet(self, reach: Reach) -> _Peer:
        idle = [name for name, peer in self._peers.items() if not peer.reads]
        if len(self._peers) >= self._max_peers and idle:
            self._lose(idle[0], ConnectionAbortedError("too many peers"))  # probably an ended process
        peer = self._peers[reach.agent] = _Peer(Agent(self._host), reach.epoch)
        return peer

    def _drive(self, peer: _Peer, read: Read) -> None:
        if read.ended.done():
            return  # lost together with another read of this peer
        try:
            if peer.step(read):
                peer.finish(read)
            elif time.monotonic() > read.give_up_at:
                log.warning("ucx read aborted source=%s reason=hung", read.reach.agent)
                self._lose(read.reach.agent, ConnectionAbortedError("a read from this source hung"))
        except Exception as error:  # noqa: BLE001 the reader must get any error
            lost = error if isinstance(error, OSError) else OSError(repr(error))
            self._lose(read.reach.agent, lost)

    def _lose(self, name: str, error: OSError) -> None:
        if peer := self._peers.pop(name, None):
            peer.close(error)


class Direct:
    """A road for host and CUDA memory. `fetch` raises NoDirectPath if UCX cannot read the source's.

    UCX has a thread of its own, which polls only while there is work: UCX sends no notifications.
    """

    def __init__(self, host: str) -> None:
        self._thread = ThreadPoolExecutor(1, "kv-ucx")
        self._fabric = Fabric(host)
        self._is_polling = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run UCX during the context. Raises OSError."""
        try:
            await asyncio.wrap_future(self._submit(self._fabric.open))
            yield
        finally:
            self._thread.submit(self._fabric.close)
            await asyncio.to_thread(self._thread.shutdown)

    @asynccontextmanager
    async def lend(self, payload: Memory) -> AsyncIterator[bytes]:
        """Let one reader read this memory while the context is open; yields an encoded Reach."""
        self._thread.submit(self._fabric.lend)
        try:
            reach = await asyncio.wrap_future(self._submit(self._fabric.reach, payload))
            yield msgspec.msgpack.encode(reach)
        finally:
            self._thread.submit(self._fabric.take_back)

    async def fetch(self, host: str, way: bytes, into: Memory) -> None:  # noqa: ARG002  it is in the Reach
        """Read the source's memory. After it returns or raises, `into` is not written."""
        read = Read(msgspec.msgpack.decode(way, type=Reach), into)
        self._submit(self._fabric.begin, read)
        ended = asyncio.wrap_future(read.ended)
        try:
            await asyncio.wait({ended})
        finally:
            if not ended.done():
                self._thread.submit(self._fabric.give_up, read)
                await asyncio.wait({ended})
            error = ended.exception()  # retrieved, even if cancelled
        if error is not None:
            raise error

    def _submit(self, call: Callable[..., T], *args: object) -> "Future[T]":
        """Run a call on the thread, which then polls."""
        result = self._thread.submit(call, *args)
        self._thread.submit(self._start_polling)
        return result

    def _start_polling(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._poll()

    def _poll(self) -> None:
        """Poll for a slice of time, so that other calls can run in between."""
        until_s = time.monotonic() + _SLICE_S
        while (pause_s := self._fabric.poll()) is not None:
            if time.monotonic() > until_s:
                with contextlib.suppress(RuntimeError):  # closed
                    self._thread.submit(self._poll)
                return
            time.sleep(pause_s)
        self._is_polling = False
