"""The block ledger: each block of the KV pool is free, used or pinned."""

import enum
from dataclasses import dataclass


class Hold(enum.Enum):
    """The state of a lease's blocks: used by a running request, pinned for a peer, or freed."""

    USED = "used"
    PINNED = "pinned"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, in token order. Only the ledger changes `hold`."""

    blocks: tuple[int, ...]
    hold: Hold = Hold.USED


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0. No tensors; each call is O(its blocks)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_pinned = 0
        self._free = list(reversed(range(num_blocks)))

    @property
    def num_free(self) -> int:
        """Blocks that `reserve` can still give."""
        return len(self._free)

    def reserve(self, num_blocks: int) -> Lease | None:
        """A lease of `num_blocks` used blocks, or None if fewer are free."""
        if num_blocks > len(self._free):
            return None
        lease = Lease(tuple(self._free.pop() for _ in range(num_blocks)))
        self.num_used += num_blocks
        return lease

    def pin(self, lease: Lease) -> None:
        """Pin a used lease: its request has ended, its KV waits for a peer."""
        if lease.hold is not Hold.USED:
            raise ValueError(f"only used blocks can be pinned; these are {lease.hold.value}")
        lease.hold = Hold.PINNED
        self.num_used -= len(lease.blocks)
        self.num_pinned += len(lease.blocks)

    def free(self, lease: Lease) -> None:
        """Free the blocks. Idempotent, as cancelling and finishing may both call it."""
        if lease.hold is Hold.FREED:
            return
        if lease.hold is Hold.USED:
            self.num_used -= len(lease.blocks)
        else:
            self.num_pinned -= len(lease.blocks)
        lease.hold = Hold.FREED
        self._free.extend(reversed(lease.blocks))
