"""The CacheTransceiver protocol: moves KV between two worker processes of the embedded engine."""

from typing import Protocol

import msgspec

from workers.kv.memory import Memory


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a puller needs to fetch one offer: its source, id, size and access data.

    `wire` is the transceiver's kind (`ucx`, `tcp`), which both sides must share. `peer` holds the offer's
    secret: only a holder of the ticket can read the bytes.
    """

    wire: str
    offer_id: int
    num_bytes: int
    peer: bytes


class NoDirectPath(OSError):
    """UCX cannot read the source's memory: not reachable by cma, CUDA IPC or RDMA, or the source died."""


class CacheTransceiver(Protocol):
    """Moves one request's KV, gathered into contiguous bytes. Contract: `tests/contract/test_transceiver.py`.

    * A pull that returns has delivered the offered bytes: after the last byte the source confirms that the
      offer still stood.
    * Every wait ends: a dead peer is HandoffFailed at once, one that sends nothing is HandoffStalled after
      STALL_S.
    * After a failed pull the offer remains; it can be pulled again until it has moved or is withdrawn.
    * All methods are called on one event loop; bytes move off it. CUDA work on the memory must be finished
      (synchronized) before `offer` and `pull`; pulled bytes are visible to every stream.
    """

    @property
    def transport_name(self) -> str:
        """The kind: `ucx`, `tcp`, `tcp+tls`. Known after `start`."""
        ...

    @property
    def paths(self) -> str:
        """What the transfers so far took, for logs and /health: `cma` (host memory, read directly), `cuda`,
        `stream`; empty before the first one, and if there is only one way.
        """
        ...

    @property
    def moves_device_memory(self) -> bool:
        """Whether CUDA memory can be offered and pulled into; if not, stage it on the host."""
        ...

    async def start(self) -> None:
        """Start; raises OSError or ImportError with the reason if this machine cannot run it."""
        ...

    def offer(self, payload: Memory) -> Ticket:
        """Make `payload` (at least one byte) readable to one peer; it must not change until the offer ends.
        Raises ValueError for memory that this transceiver cannot move.
        """
        ...

    async def moved(self, ticket: Ticket) -> int:
        """Wait until a peer has pulled what it wanted of the offer; returns how many bytes that were. Raises
        HandoffFailed if it was withdrawn before.
        """
        ...

    def withdraw(self, ticket: Ticket) -> None:
        """End the offer, pulled or not; idempotent. Later pulls fail, so the memory may be overwritten at
        once; its `owner` is released when active readers have ended.
        """
        ...

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """Fetch the last `into.num_bytes` of an offer. Raises HandoffFailed, after which `into` is not
        written any more; ValueError for memory that this transceiver cannot move.
        """
        ...

    async def close(self) -> None:
        """Withdraw every offer, fail every pull with HandoffFailed, stop."""
        ...
