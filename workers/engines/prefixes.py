"""Keys of prompts' beginnings, and an estimate of what an engine has cached that does not report it."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile


def next_key(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block with these tokens that follows `previous`: equal keys mean equal tokens from the
    start."""
    return hashlib.blake2b(previous + array("I", token_ids).tobytes(), digest_size=16).digest()


def keys_within(previous: bytes, token_ids: Sequence[int]) -> Iterator[bytes]:
    """The `next_key` of the first of these tokens, of the first two, and so on; in linear time."""
    hashed = hashlib.blake2b(previous, digest_size=16)
    for token_id in token_ids:
        hashed.update(array("I", [token_id]))
        yield hashed.copy().digest()


class Chain:
    """The keys of a growing sequence: of its salt, then of its full blocks. Each token is hashed once, and no
    block with another salt has the same keys."""

    def __init__(self, cache_salt: str = "") -> None:
        salt = hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"salt")
        self.keys = [salt.digest()]

    def follow(self, token_ids: Sequence[int], num_tokens: int, tokens_per_block: int) -> Iterator[bytes]:
        """The keys of the blocks that are full since the last call: `num_tokens`, of a sequence that begins
        as before."""
        size = tokens_per_block
        for end in range(len(self.keys) * size, num_tokens + 1, size):
            self.keys.append(next_key(self.keys[-1], token_ids[end - size : end]))
            yield self.keys[-1]


class HeldPrefixes:
    """Full blocks of recent sequences, at most `max_blocks`: the least recently used ones are forgotten."""

    def __init__(self, tokens_per_block: int, max_blocks: int) -> None:
        self._tokens_per_block = tokens_per_block
        self.max_blocks = max_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_held(self, token_ids: Sequence[int], cache_salt: str) -> int:
        """How many of the tokens, from the first on, are in held blocks."""
        keys = Chain(cache_salt).follow(token_ids, len(token_ids), self._tokens_per_block)
        return sum(self._tokens_per_block for _ in takewhile(self._keys.__contains__, keys))

    def hold(self, chain: Chain, token_ids: Sequence[int]) -> None:
        """The engine has computed or received the KV of these tokens; `chain` is that of the sequence."""
        if not self.max_blocks:
            return
        deque(chain.follow(token_ids, len(token_ids), self._tokens_per_block), maxlen=0)
        # Last block first: it is forgotten before those that it follows.
        for key in chain.keys[:0:-1]:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)
