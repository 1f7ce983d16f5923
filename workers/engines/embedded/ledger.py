"""The block ledger: who holds each block of the KV pool, and which free ones still have KV worth finding."""

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


class Hold(enum.Enum):
    """The state of a lease's blocks: used by a running request, pinned for a peer, or freed."""

    USED = "used"
    PINNED = "pinned"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, in token order; the first `num_found` had their KV already. Only the ledger
    changes `hold`.
    """

    blocks: tuple[int, ...]
    num_found: int = 0
    hold: Hold = Hold.USED


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0; each call is O(its blocks). No tensors.

    A block may be in several leases; it counts as used if any of these is, else as pinned. What a free block
    holds can be found until the block is needed; the least recently used go first, of a lease its last ones.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_pinned = 0
        self._free = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, and with a key
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._num_users = [0] * num_blocks
        self._num_pins = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `reserve` can still give."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Free blocks whose KV can still be found."""
        return len(self._kept)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the first keys, as far as they are known."""
        found: list[int] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def reserve(self, num_blocks: int, keys: Sequence[bytes] = ()) -> Lease | None:
        """A lease of `num_blocks` used blocks, or None if fewer are free. Its first ones are those that
        `find` gives for `keys`; they may be shared and must not be written.
        """
        found = self.find(keys)
        num_new = num_blocks - len(found)
        if num_new > self.num_free - sum(block in self._kept for block in found):
            return None
        for block in found:
            self._kept.pop(block, None)
        blocks = (*found, *(self._take() for _ in range(num_new)))
        for block in blocks:
            self._count(block, users=1)
        return Lease(blocks, len(found))

    def keep(self, lease: Lease, index: int, key: bytes) -> None:
        """The lease's block at that index is full: it can be found by `key`, unless another one is."""
        if key not in self._blocks:
            self._blocks[key] = lease.blocks[index]
            self._keys[lease.blocks[index]] = key

    def pin(self, lease: Lease) -> None:
        """Pin a used lease: its request has ended, its KV waits for a peer."""
        if lease.hold is not Hold.USED:
            raise ValueError(f"only used blocks can be pinned; these are {lease.hold.value}")
        lease.hold = Hold.PINNED
        for block in lease.blocks:
            self._count(block, users=-1, pins=1)

    def free(self, lease: Lease) -> None:
        """Free the blocks. Idempotent, as cancelling and finishing may both call it."""
        if lease.hold is Hold.FREED:
            return
        is_used = lease.hold is Hold.USED
        lease.hold = Hold.FREED
        for block in reversed(lease.blocks):
            self._count(block, users=-is_used, pins=is_used - 1)
            if self._num_users[block] or self._num_pins[block]:
                continue
            if block in self._keys:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._kept.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block

    def _count(self, block: int, users: int = 0, pins: int = 0) -> None:
        for sign in (-1, 1):
            is_used = self._num_users[block] > 0
            self.num_used += sign * is_used
            self.num_pinned += sign * (not is_used and self._num_pins[block] > 0)
            if sign < 0:
                self._num_users[block] += users
                self._num_pins[block] += pins
