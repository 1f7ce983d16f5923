"""The seam for moving KV bytes between two worker processes of the embedded engine."""

from typing import Protocol

import msgspec


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the puller needs to fetch one offer: where it is, which one, how long, and the wire's own words.

    `wire` is the transceiver's kind (`ucx`, `tcp`); a ticket is opened only by the same kind.
    """

    wire: str
    offer_id: int
    num_bytes: int
    peer: bytes


class CacheTransceiver(Protocol):
    """Moves one request's KV, gathered into contiguous bytes. Held to `tests/contract/test_transceiver.py`.

    Every wait ends: a dead peer is HandoffFailed at once, a hung one at the deadline. An offer is pinned from
    `offer` until it was pulled or withdrawn; what is withdrawn is never read again. All methods are called
    on the event loop; bytes move off it.
    """

    @property
    def transport_name(self) -> str:
        """Kind and transport in use, for logs and /health: `ucx (cma)`, `tcp`."""
        ...

    async def start(self) -> None:
        """Bring up the wire; raises OSError or ImportError with the reason if this machine cannot."""
        ...

    def offer(self, payload: memoryview) -> Ticket:
        """Make `payload` readable to one peer. The memory stays the caller's and must live until the end."""
        ...

    async def moved(self, ticket: Ticket) -> None:
        """Wait until a peer has pulled the offer."""
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """End the offer, pulled or not. After the return nobody reads the memory any more. Idempotent."""
        ...

    async def pull(self, ticket: Ticket, into: memoryview, deadline_s: float) -> None:
        """Fetch an offer of `ticket.num_bytes` into writable memory of that size. Raises HandoffFailed."""
        ...

    async def close(self) -> None:
        """Withdraw every offer, fail every pull, free the wire."""
        ...
