"""The seam for moving KV bytes between two worker processes of the embedded engine."""

from typing import Protocol

import msgspec

from workers.kv.memory import Memory


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the puller needs to fetch one offer: where it is, which one, how long, and the wire's own words.

    `wire` is the transceiver's kind (`ucx`, `tcp`); a ticket is opened only by the same kind. `peer` holds
    the offer's secret: who has the ticket can read the bytes, nobody else.
    """

    wire: str
    offer_id: int
    num_bytes: int
    peer: bytes


class CacheTransceiver(Protocol):
    """Moves one request's KV, gathered into contiguous bytes. Held to `tests/contract/test_transceiver.py`.

    * A pull that returns has delivered the bytes that were offered: the source confirms, after the last byte
      was read, that the offer still stood.
    * Every wait ends: a dead peer is HandoffFailed at once, a hung one at the deadline.
    * A failed pull leaves the offer standing; it can be pulled again until it has moved or is withdrawn.
    * All methods are called on one event loop; bytes move off it. CUDA work on the memory is finished
      (synchronized) before `offer` and `pull`, and bytes pulled are visible to every stream.
    """

    @property
    def transport_name(self) -> str:
        """Kind and transport in use, for logs and /health: `ucx (cma)`, `tcp`. Known after `start`."""
        ...

    @property
    def moves_device_memory(self) -> bool:
        """Whether CUDA memory can be offered and pulled into; if not, stage the bytes on the host."""
        ...

    async def start(self) -> None:
        """Bring up the wire; raises OSError or ImportError with the reason if this machine cannot."""
        ...

    def offer(self, payload: Memory) -> Ticket:
        """Make `payload` (at least one byte) readable to one peer; it must not change until the end of the
        offer. Raises ValueError on memory that this wire cannot move.
        """
        ...

    async def moved(self, ticket: Ticket) -> None:
        """Wait until a peer has pulled the offer. Raises HandoffFailed if it was withdrawn before."""
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """End the offer, pulled or not; idempotent. After the return no pull of it succeeds, so the memory
        may be overwritten at once; its `owner` is let go when a reader that was at work has ended.
        """
        ...

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """Fetch an offer into memory of exactly `ticket.num_bytes`. Raises HandoffFailed; after that, too,
        nobody writes `into` any more. Raises ValueError on memory that this wire cannot move.
        """
        ...

    async def close(self) -> None:
        """Withdraw every offer, fail every pull with HandoffFailed, free the wire."""
        ...
