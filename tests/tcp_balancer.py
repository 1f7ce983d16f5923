"""A plain TCP load balancer: connections go to the backends in turn, past those that refuse.

With one backend, it is a relay that can be cut."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class TcpBalancer:
    """Balances over loopback ports. `num_connections` counts those of each backend."""

    def __init__(self, *ports: int) -> None:
        self.num_connections = dict.fromkeys(ports, 0)
        self._turn = itertools.cycle(ports)
        self._open: set[asyncio.StreamWriter] = set()
        self._cut = asyncio.Event()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """Balance during the context; yields the port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
        self._ended.set()
        for writer in self._open:
            writer.close()
        while self._open:
            await asyncio.sleep(0)  # poll: writers do not notify

    def cut(self) -> None:
        """Carry nothing more on the connections that are open, and keep them; new ones work."""
        self._cut.set()
        self._cut = asyncio.Event()

    def abort(self) -> None:
        """Reset the connections that are open."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        backend = await self._connected()
        if backend is not None:
            self._open.add(backend[1])
            await asyncio.gather(self._copy(reader, backend[1]), self._copy(backend[0], writer))
            self._open.remove(backend[1])
        writer.close()
        self._open.remove(writer)

    async def _connected(self) -> _Ends | None:
        for port in itertools.islice(self._turn, len(self.num_connections)):
            with contextlib.suppress(OSError):
                ends = await asyncio.open_connection("127.0.0.1", port)
                self.num_connections[port] += 1
                return ends
        return None

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Until either side ends, which ends both."""
        cut = self._cut
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                if cut.is_set():
                    await self._ended.wait()
                target.write(data)
                await target.drain()
        target.close()


@contextmanager
def balanced(*ports: int) -> Iterator[tuple[str, TcpBalancer]]:
    """The URL of a balancer, which runs in a thread."""
    balancer, loop, ready = TcpBalancer(*ports), asyncio.new_event_loop(), threading.Event()
    found: list[int] = []
    ended = asyncio.Event()

    async def run() -> None:
        async with balancer.listening() as port:
            found.append(port)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        ready.wait()
        yield f"http://127.0.0.1:{found[0]}", balancer
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()
