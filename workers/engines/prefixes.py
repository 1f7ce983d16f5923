"""Keys of prompts' beginnings, and what an engine that does not tell probably has cached."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence


def first_key(cache_salt: str) -> bytes:
    """What the first block's key follows: no block with another salt has the same keys."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"salt").digest()


def next_key(previous: bytes, token_ids: "array[int]") -> bytes:
    """The key of a full block that follows `previous`: equal keys mean equal tokens from the start."""
    return hashlib.blake2b(previous + token_ids.tobytes(), digest_size=16).digest()


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
        for key in self._chain(token_ids, cache_salt):
            if key not in self._keys:
                break
            num_blocks += 1
        return num_blocks * self._tokens_per_block

    def hold(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """The engine has computed or received the KV of these tokens."""
        if not self.max_blocks:
            return
        # Last block first: it is forgotten before those that it follows.
        for key in reversed(list(self._chain(token_ids, cache_salt))):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)

    def _chain(self, token_ids: Sequence[int], cache_salt: str) -> Iterator[bytes]:
        tokens, key = array("I", token_ids), first_key(cache_salt)
        size = self._tokens_per_block
        for end in range(size, len(tokens) + 1, size):
            key = next_key(key, tokens[end - size : end])
            yield key
