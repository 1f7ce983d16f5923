"""The cache transceiver over TCP, plain or with TLS: host memory only, no dependencies."""

from baton.peer_tls import PeerTls
from workers.kv.memory import Memory, host_view
from workers.kv.pulls import Pulls
from workers.kv.source import Source
from workers.kv.transceiver import Ticket


class TcpTransceiver:
    """Implements CacheTransceiver; the bytes follow the source's Grant on the same connection."""

    moves_device_memory = False
    paths = ""

    def __init__(self, host: str, tls: PeerTls | None = None) -> None:
        """`host`: the address to listen on and to announce to pullers."""
        self.transport_name = "tcp" if tls is None else "tcp+tls"
        self._source = Source(self.transport_name, host, tls=tls)
        self._pulls = Pulls(self.transport_name, tls=tls)

    async def start(self) -> None:
        """See CacheTransceiver."""
        await self._source.start()

    def offer(self, payload: Memory) -> Ticket:
        """See CacheTransceiver."""
        host_view(payload)  # refuses device memory
        return self._source.offer(payload)

    async def moved(self, ticket: Ticket) -> int:
        """See CacheTransceiver."""
        return await self._source.moved(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """See CacheTransceiver."""
        self._source.withdraw(ticket)

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """See CacheTransceiver."""
        host_view(into)  # refuses device memory
        await self._pulls.pull(ticket, into, deadline_s)

    async def close(self) -> None:
        """See CacheTransceiver."""
        await self._pulls.close()
        await self._source.close()
