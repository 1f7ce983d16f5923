"""The block ledger: who holds each block of the KV pool, and which free ones still have KV worth finding."""

import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice


def first_whole_block(num_tokens: int, *, window: int, tokens_per_block: int) -> int:
    """The first block that sliding-window layers need to continue after `num_tokens`, or after the full
    blocks before them; `window` is the longest window in tokens, 0 without any.
    """
    last = (num_tokens - 1) // tokens_per_block * tokens_per_block
    return max(0, last - window + 1) // tokens_per_block if window else 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence looks for: the first `num_tokens` of `token_ids`, of whose full blocks `keys[1:]` are
    the keys; `keys[0]` is that of the salt. If k blocks are found, those from `first_whole(k)` must have the
    KV of all layers.
    """

    keys: Sequence[bytes]
    token_ids: Sequence[int]
    num_tokens: int
    first_whole: Callable[[int], int]


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
    """What a block holds. `is_whole`: KV of all layers, not only of those with full attention."""

    key: bytes
    is_whole: bool = True
    end: Sequence[int] = ()


class PrefixIndex:
    """Blocks by what they hold: a key has one block at most, and one block with an end that follows it."""

    def __init__(self, tokens_per_block: int) -> None:
        self.tokens_per_block = tokens_per_block
        self._blocks: dict[bytes, int] = {}
        self._ends: dict[bytes, int] = {}
        self._held: dict[int, _Held] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._held

    def add(self, block: int, key: bytes, *, is_whole: bool) -> int | None:
        """Let a full block be found, unless a whole one is; returns the block that it replaces."""
        other = self._blocks.get(key)
        if block in self._held or (other is not None and self._held[other].is_whole):
            return None
        if other is not None:
            self.remove(other)
        self._blocks[key] = block
        self._held[block] = _Held(key, is_whole)
        return other

    def add_end(self, block: int, end: End) -> int | None:
        """Let an end be found; returns the block of the one that it replaces."""
        other = self._ends.get(end.after)
        if other is not None:
            self.remove(other)
        self._ends[end.after] = block
        self._held[block] = _Held(end.after, end=end.token_ids)
        return other

    def remove(self, block: int) -> None:
        """The block will be overwritten."""
        held = self._held.pop(block)
        del (self._ends if held.end else self._blocks)[held.key]

    def find(self, prefix: Prefix) -> tuple[list[int], int]:
        """(the blocks with the beginning of `prefix`, how many of its tokens they hold). If these do not fill
        the last block, it holds an end, and the finder may write its other tokens.
        """
        found = self._full_blocks(prefix)
        num_tokens = len(found) * self.tokens_per_block
        wanted = prefix.token_ids[num_tokens : min(num_tokens + self.tokens_per_block, prefix.num_tokens)]
        end = self._ends.get(prefix.keys[len(found)])
        if end is None:
            return found, num_tokens
        num_equal = _num_equal(self._held[end].end, wanted)
        return ([*found, end], num_tokens + num_equal) if num_equal else (found, num_tokens)

    def _full_blocks(self, prefix: Prefix) -> list[int]:
        found: list[int] = []
        for key in islice(prefix.keys, 1, None):
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        while True:
            needed = range(prefix.first_whole(len(found)), len(found))
            partial = next((i for i in needed if not self._held[found[i]].is_whole), None)
            if partial is None:
                return found
            del found[partial:]


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    equal = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        equal += 1
    return equal


class Hold(enum.Enum):
    """The state of a lease's blocks: used by a running request, pinned for a peer, or freed."""

    USED = "used"
    PINNED = "pinned"
    FREED = "freed"


@dataclass(slots=True, eq=False)
class Lease:
    """The blocks of one request, in token order; the KV of its first `num_found` tokens was there already.
    `end` is what can be found in its last block once it is free. Only the ledger changes `hold`."""

    blocks: tuple[int, ...]
    num_found: int = 0
    hold: Hold = Hold.USED
    end: End | None = None


class BlockLedger:
    """Bookkeeping for `num_blocks` blocks, numbered from 0; each call is O(its blocks). No tensors.

    A block may be in several leases; it counts as used if any of these is, else as pinned. What a free block
    holds can be found until the block is needed; the least recently used go first, of a lease its last ones.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_pinned = 0
        self._free = list(reversed(range(num_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, and in the index
        self._index = PrefixIndex(tokens_per_block)
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

    def num_found(self, prefix: Prefix) -> int:
        """How many tokens of `prefix` are found now."""
        return self._index.find(prefix)[1]

    def reserve(self, num_blocks: int, prefix: Prefix | None = None) -> Lease | None:
        """A lease of `num_blocks` used blocks, or None if fewer are free. Its first ones have what was found
        of `prefix`; the full ones may be shared and must not be written.
        """
        found, num_found = self._index.find(prefix) if prefix is not None else ([], 0)
        num_new = num_blocks - len(found)
        if num_new > self.num_free - sum(block in self._kept for block in found):
            return None
        for block in found:
            self._kept.pop(block, None)
        if prefix is not None and num_found % self._index.tokens_per_block:
            self._index.remove(found[-1])
        blocks = (*found, *(self._take() for _ in range(num_new)))
        for block in blocks:
            self._count(block, users=1)
        return Lease(blocks, num_found)

    def keep(self, lease: Lease, index: int, key: bytes, *, is_whole: bool = True) -> None:
        """The lease's block at that index is full: it can be found by `key`. `is_whole`: it has the KV of all
        layers, not only of those with full attention.
        """
        self._forgotten(self._index.add(lease.blocks[index], key, is_whole=is_whole))

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
            if lease.end is not None and block == lease.blocks[lease.end.index]:
                self._forgotten(self._index.add_end(block, lease.end))
            if block in self._index:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _forgotten(self, block: int | None) -> None:
        """Another block replaced this one in the index."""
        if block is not None and block in self._kept:
            del self._kept[block]
            self._free.append(block)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._kept.popitem(last=False)
        self._index.remove(block)
        return block

    def _count(self, block: int, users: int = 0, pins: int = 0) -> None:
        for sign in (-1, 1):
            is_used = self._num_users[block] > 0
            self.num_used += sign * is_used
            self.num_pinned += sign * (not is_used and self._num_pins[block] > 0)
            if sign < 0:
                self._num_users[block] += users
                self._num_pins[block] += pins
