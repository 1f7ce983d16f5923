"""The block ledger: who holds each block of the KV pool, and which free ones still have KV worth finding."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence looks for: the first `num_tokens` of `token_ids`, of whose full blocks `keys[1:]` are
    the keys; `keys[0]` is that of the salt.
    """

    keys: Sequence[bytes]
    token_ids: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class End:
    """The last tokens of a sequence, fewer than a block, in its block at `index`; `after` is the key of the
    block before.
    """

    index: int
    after: bytes
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Held:
    """What a block holds. `end`: the tokens of an end, whose key is `_end_key` of the block before."""

    key: bytes
    end: Sequence[int] = ()


def _end_key(after: bytes) -> bytes:
    return b"end" + after


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    equal = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        equal += 1
    return equal


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The blocks of one request, in token order; the KV of its first `num_found` tokens was there already."""

    blocks: tuple[int, ...] = ()
    num_found: int = 0


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0; each call is O(its blocks). No tensors.

    A block may be in several leases; it counts as pinned if any of these is, else as used. What a free block
    holds can be found until the block is needed; the least recently used go first, of a lease its last ones.
    A key has one block at most.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, and held
        self._tokens_per_block = tokens_per_block
        self._blocks: dict[bytes, int] = {}
        self._held: dict[int, _Held] = {}
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

    def num_found(self, prefix: Prefix) -> int:
        """How many tokens of `prefix` are found now."""
        return self._find(prefix)[1]

    def reserve(self, num_blocks: int, prefix: Prefix | None = None) -> Lease | None:
        """A lease of `num_blocks` used blocks, or None if fewer are free. Its first ones have what was found
        of `prefix`; the full ones may be shared and must not be written.
        """
        found, num_found = self._find(prefix) if prefix is not None else ([], 0)
        num_new = num_blocks - len(found)
        if num_new > self.num_free - sum(block in self._kept for block in found):
            return None
        for block in found:
            self._kept.pop(block, None)
        if prefix is not None and num_found % self._tokens_per_block:
            self._forget(found[-1])
        blocks = (*found, *(self._take() for _ in range(num_new)))
        for block in blocks:
            self._num_leases[block] += 1
        return Lease(blocks, num_found)

    def keep(self, lease: Lease, index: int, key: bytes) -> None:
        """The lease's block at that index is full: it can be found by `key`, unless another one is."""
        if key not in self._blocks:
            self._hold(lease.blocks[index], _Held(key))

    def pin(self, lease: Lease) -> None:
        """The lease's request has ended, its KV waits for a peer."""
        self._pinned.add(lease)

    def free(self, lease: Lease, end: End | None = None) -> None:
        """Free the blocks, once; `end` is what can be found in the last of them."""
        self._pinned.discard(lease)
        for i, block in reversed(list(enumerate(lease.blocks))):
            self._num_leases[block] -= 1
            if self._num_leases[block]:
                continue
            if end is not None and i == end.index:
                key = _end_key(end.after)
                if (other := self._blocks.get(key)) is not None:
                    self._forget(other)
                    del self._kept[other]
                    self._free.append(other)
                self._hold(block, _Held(key, end.token_ids))
            if block in self._held:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._kept.popitem(last=False)
        self._forget(block)
        return block

    def _hold(self, block: int, held: _Held) -> None:
        self._blocks[held.key] = block
        self._held[block] = held

    def _forget(self, block: int) -> None:
        """The block will be overwritten."""
        del self._blocks[self._held.pop(block).key]

    def _find(self, prefix: Prefix) -> tuple[list[int], int]:
        """(the blocks with the beginning of `prefix`, how many of its tokens they hold). If these do not fill
        the last block, it holds an end, and the finder may write its other tokens.
        """
        found: list[int] = []
        for key in islice(prefix.keys, 1, None):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        num_tokens = len(found) * self._tokens_per_block
        wanted = prefix.token_ids[num_tokens : min(num_tokens + self._tokens_per_block, prefix.num_tokens)]
        end = self._blocks.get(_end_key(prefix.keys[len(found)]))
        if end is None:
            return found, num_tokens
        num_equal = _num_equal(self._held[end].end, wanted)
        return ([*found, end], num_tokens + num_equal) if num_equal else (found, num_tokens)
