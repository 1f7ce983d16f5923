"""The block ledger: who holds which block of the KV pool; every block is free, used or pinned, always."""

import enum
from dataclasses import dataclass


class Hold(enum.Enum):
    """What a lease's blocks are doing: written by a running request, offered to a peer, or given back."""

    USED = "used"
    PINNED = "pinned"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks of one request, in the order of its tokens. Only the ledger changes `hold`."""

    blocks: tuple[int, ...]
    hold: Hold = Hold.USED


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0. Knows no tensors; each call is O(its blocks)."""

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
        """A lease of `num_blocks` used blocks, or None if there are not as many: all or nothing."""
        if num_blocks > len(self._free):
            return None
        lease = Lease(tuple(self._free.pop() for _ in range(num_blocks)))
        self.num_used += num_blocks
        return lease

    def pin(self, lease: Lease) -> None:
        """Turn a used lease into a pinned one: its request runs no more, its KV waits for a peer."""
        if lease.hold is not Hold.USED:
            raise ValueError(f"only used blocks can be pinned; these are {lease.hold.value}")
        lease.hold = Hold.PINNED
        self.num_used -= len(lease.blocks)
        self.num_pinned += len(lease.blocks)

    def free(self, lease: Lease) -> None:
        """Give the blocks back. Idempotent, as cancelling and finishing may both come to it."""
        if lease.hold is Hold.FREED:
            return
        if lease.hold is Hold.USED:
            self.num_used -= len(lease.blocks)
        else:
            self.num_pinned -= len(lease.blocks)
        lease.hold = Hold.FREED
        self._free.extend(reversed(lease.blocks))
