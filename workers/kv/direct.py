"""KV bytes over UCX: the reader reads the source's memory itself, at link speed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from workers.kv.fabric import Fabric, Read
from workers.kv.memory import Memory
from workers.kv.poller import Poller
from workers.kv.ucx import Reach


class Direct:
    """A road for host and CUDA memory. `fetch` raises NoDirectPath if UCX cannot read the source's."""

    def __init__(self, host: str) -> None:
        self._poller = Poller()
        self._fabric = Fabric(host, self._poller.submit)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run UCX during the context. Raises OSError."""
        self._poller.start("kv-ucx", self._fabric.poll)
        try:
            await asyncio.wrap_future(self._poller.submit(self._fabric.open))
            yield
        finally:
            self._poller.submit(self._fabric.close)
            await asyncio.to_thread(self._poller.stop)

    @asynccontextmanager
    async def lend(self, payload: Memory) -> AsyncIterator[bytes]:
        """Let one reader read this memory while the context is open; yields an encoded Reach."""
        self._poller.submit(self._fabric.lend)
        try:
            reach = await asyncio.wrap_future(self._poller.submit(self._fabric.reach, payload))
            yield msgspec.msgpack.encode(reach)
        finally:
            self._poller.submit(self._fabric.take_back)

    async def fetch(self, host: str, way: bytes, into: Memory) -> None:  # noqa: ARG002  it is in the Reach
        """Read the source's memory. Once it returns or raises, `into` is not written any more."""
        read = Read(msgspec.msgpack.decode(way, type=Reach), into)
        self._poller.submit(self._fabric.begin, read)
        ended = asyncio.wrap_future(read.ended)
        try:
            await asyncio.wait({ended})
        finally:
            if not ended.done():
                self._poller.submit(self._fabric.give_up, read)
                await asyncio.wait({ended})
            error = ended.exception()  # retrieved, even if cancelled
        if error is not None:
            raise error
