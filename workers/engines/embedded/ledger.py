"""The block ledger: who holds each block of the KV pool, and which free ones still have KV worth finding."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The blocks of one request, in token order."""

    blocks: tuple[int, ...] = ()


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0; each call is O(its blocks). No tensors.

    A block may be in several leases; it counts as pinned if any of these is, else as used. What a free block
    holds can be found until the block is needed; the least recently used go first, of a lease its last ones.
    A key has one block at most."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, with a key
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._num_leases = [0] * num_blocks
        self._pinned: set[Lease] = set()

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_pinned

    @property
    def num_pinned(self) -> int:
        return len({block for lease in self._pinned for block in lease.blocks})

    @property
    def num_free(self) -> int:
        """Blocks that `reserve` can still give."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Free blocks whose KV can still be found."""
        return len(self._kept)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys, up to the first key that has none."""
        return [self._blocks[key] for key in takewhile(self._blocks.__contains__, keys)]

    def reserve(self, num_blocks: int, found: Sequence[int] = (), num_shared: int = 0) -> Lease | None:
        """A lease of `num_blocks` used blocks, or None if fewer are free. Its first ones are those `found`;
        the first `num_shared` may be in other leases and must not be written, the others cannot be found any
        more."""
        num_new = num_blocks - len(found)
        if num_new > self.num_free - sum(block in self._kept for block in found):
            return None
        for block in found:
            self._kept.pop(block, None)
        for block in found[num_shared:]:
            self._forget(block)
        blocks = (*found, *(self._take() for _ in range(num_new)))
        for block in blocks:
            self._num_leases[block] += 1
        return Lease(blocks)

    def keep(self, lease: Lease, index: int, key: bytes) -> None:
        """The lease's block at that index can be found by `key`, unless another one is."""
        if key not in self._blocks:
            self._blocks[key] = lease.blocks[index]
            self._keys[lease.blocks[index]] = key

    def pin(self, lease: Lease) -> None:
        """The lease's request has ended, its KV waits for a peer."""
        self._pinned.add(lease)

    def free(self, lease: Lease) -> None:
        """Free the blocks, once."""
        self._pinned.discard(lease)
        for block in reversed(lease.blocks):
            self._num_leases[block] -= 1
            if self._num_leases[block]:
                continue
            if block in self._keys:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._kept.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        """The block will be overwritten."""
        del self._blocks[self._keys.pop(block)]
