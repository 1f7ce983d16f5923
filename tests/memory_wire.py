"""A cache transceiver inside one process, whose pulls a test can hold or fail."""

import asyncio

from baton.errors import HandoffFailed
from tests.waiting import PATIENCE_S
from workers.kv.memory import Memory, host_view
from workers.kv.transceiver import CacheTransceiver, Ticket


class Wire(CacheTransceiver):
    """A CacheTransceiver inside one process; `on_pull` runs before each pull."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self.transport_name = "memory"
        self.offers: dict[int, Memory] = {}
        self.num_pulls = 0
        self.addresses: set[int] = set()
        self._alive: list[Memory] = []  # so that no other gets the address
        self.hold = asyncio.Event()
        self.hold.set()
        self.fault: Exception | None = None
        self._has_moved: dict[int, asyncio.Event] = {}
        self._num_bytes: dict[int, int] = {}

    async def start(self) -> None:
        pass

    def offer(self, payload: Memory) -> Ticket:
        offer_id = len(self._has_moved)
        self.offers[offer_id] = payload
        self._see(payload)
        self._has_moved[offer_id] = asyncio.Event()
        return Ticket(wire="memory", offer_id=offer_id, num_bytes=payload.num_bytes, address="", secret=b"")

    def _see(self, buffer: Memory) -> None:
        self.addresses.add(buffer.address)
        self._alive.append(buffer)

    async def moved(self, ticket: Ticket) -> int:
        await self._has_moved[ticket.offer_id].wait()
        return self._num_bytes[ticket.offer_id]

    def withdraw(self, ticket: Ticket) -> None:
        self.offers.pop(ticket.offer_id, None)

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        self.num_pulls += 1
        self._see(into)
        async with asyncio.timeout(PATIENCE_S):
            await self.hold.wait()
        if self.fault is not None:
            raise self.fault
        if ticket.offer_id not in self.offers:
            raise HandoffFailed("the offer was withdrawn")
        host_view(into)[:] = host_view(self.offers[ticket.offer_id])[-into.num_bytes :]
        self._num_bytes[ticket.offer_id] = into.num_bytes
        self._has_moved[ticket.offer_id].set()

    def all_moved(self) -> bool:
        """Whether every pull has ended."""
        return all(each.is_set() for each in self._has_moved.values())

    async def close(self) -> None:
        self.offers.clear()
