"""A cache transceiver inside one process, whose pulls a test can hold or fail."""

import asyncio

from baton.errors import HandoffFailed
from tests.waiting import PATIENCE_S
from workers.kv.transceiver import CacheTransceiver, Ticket


class Wire(CacheTransceiver):
    """A CacheTransceiver inside one process; `on_pull` runs before each pull."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self.transport_name = "memory"
        self.offers: dict[int, memoryview] = {}
        self.num_pulls = 0
        self.deadlines_s: list[float] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.fault: Exception | None = None
        self._has_moved: dict[int, asyncio.Event] = {}
        self._num_bytes: dict[int, int] = {}

    async def start(self) -> None:
        pass

    def offer(self, payload: memoryview) -> Ticket:
        offer_id = len(self._has_moved)
        self.offers[offer_id] = payload
        self._has_moved[offer_id] = asyncio.Event()
        return Ticket(wire="memory", offer_id=offer_id, num_bytes=payload.nbytes, address="", secret=b"")

    async def moved(self, ticket: Ticket) -> int:
        await self._has_moved[ticket.offer_id].wait()
        return self._num_bytes[ticket.offer_id]

    def withdraw(self, ticket: Ticket) -> None:
        self.offers.pop(ticket.offer_id, None)

    async def pull(self, ticket: Ticket, into: memoryview, deadline_s: float) -> None:
        self.num_pulls += 1
        self.deadlines_s.append(deadline_s)
        async with asyncio.timeout(PATIENCE_S):
            await self.hold.wait()
        if self.fault is not None:
            raise self.fault
        if ticket.offer_id not in self.offers:
            raise HandoffFailed("the offer was withdrawn")
        into[:] = self.offers[ticket.offer_id][-into.nbytes :]
        self._num_bytes[ticket.offer_id] = into.nbytes
        self._has_moved[ticket.offer_id].set()

    def all_moved(self) -> bool:
        """Whether every pull has ended."""
        return all(each.is_set() for each in self._has_moved.values())

    async def close(self) -> None:
        self.offers.clear()
