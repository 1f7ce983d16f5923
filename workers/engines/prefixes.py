"""Keys of prompts' beginnings, and an estimate of what an engine has cached that does not report it."""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence


def first_key(cache_salt: str) -> bytes:
    """What the first block's key follows: no block with another salt has the same keys."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"salt").digest()


def next_key(previous: bytes, token_ids: "array[int]") -> bytes:
    """The key of a full block that follows `previous`: equal keys mean equal tokens from the start."""
    return hashlib.blake2b(previous + token_ids.tobytes(), digest_size=16).digest()


class Chain:
    """The keys of a growing sequence's full blocks; each token is hashed once."""

    def __init__(self, tokens_per_block: int, cache_salt: str) -> None:
        self.keys: list[bytes] = []
        self._size = tokens_per_block
        self._last, self._rest = first_key(cache_salt), array("I")

    def add(self, token_ids: Iterable[int]) -> Iterator[bytes]:
        """The keys of the blocks that these tokens complete."""
        self._rest.extend(token_ids)
        rest, self._rest = self._rest, self._rest[len(self._rest) // self._size * self._size :]
        for end in range(self._size, len(rest) + 1, self._size):
            self._last = next_key(self._last, rest[end - self._size : end])
            self.keys.append(self._last)
            yield self._last


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
        num_blocks = 0
        for key in Chain(self._tokens_per_block, cache_salt).add(token_ids):
            if key not in self._keys:
                break
            num_blocks += 1
        return num_blocks * self._tokens_per_block

    def hold(self, token_ids: Sequence[int], cache_salt: str) -> Chain:
        """The engine has computed or received the KV of these tokens; `extend` takes the result."""
        chain = Chain(self._tokens_per_block, cache_salt)
        self.extend(chain, token_ids)
        return chain

    def extend(self, chain: Chain, token_ids: Iterable[int]) -> None:
        """The KV of more tokens follows."""
        if not self.max_blocks:
            return
        deque(chain.add(token_ids), maxlen=0)
        # Last block first: it is forgotten before those that it follows.
        for key in reversed(chain.keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)
