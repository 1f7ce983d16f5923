"""What can be found again in the KV pool: full blocks by the tokens up to them, sequences' last tokens."""

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
