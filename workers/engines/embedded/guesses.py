"""Guessed tokens: what followed the same tokens earlier in the prompt or the answer."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST_GUESSES = 15
"""In one step of one sequence."""

# Tokens that must be equal before a guess; the longest match counts.
_MATCHES = (8, 5, 3, 2)
_FIRST_GUESSES = 3
_LONGEST_PAUSE = 64
_MAX_BITS = 17
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # odd, from the golden ratio


class Guesser:
    """Guesses the next tokens of one sequence.

    The table of each length of match has the latest place of each match, in slots by hash: a token is added
    in constant time, memory is bounded, and a place counts only if its tokens are equal. Guesses become more
    while they are right and fewer when they are wrong; the longest match allows the most at once. After
    useless ones there are none for a few steps, twice as many each time."""

    def __init__(self, num_reserved: int) -> None:
        """`num_reserved`: the sequence's maximum length."""
        self._bits = min((2 * num_reserved).bit_length(), _MAX_BITS)
        self._tables = [np.zeros(1 << self._bits, np.uint32) for _ in _MATCHES]
        self._num_known = 0
        self._num_next = _FIRST_GUESSES
        self._pause = self._num_useless = 0

    def guess(self, token_ids: list[int], most: int) -> list[int]:
        """At most `most` tokens that may follow these, which begin as in the call before."""
        places = [
            self._follow(token_ids, length, table)
            for length, table in zip(_MATCHES, self._tables, strict=True)
        ]
        self._num_known = len(token_ids)
        if self._pause:
            self._pause -= 1
            return []
        for place, length in zip(places, _MATCHES, strict=True):
            if place and token_ids[place - length : place] == token_ids[-length:]:
                is_likely = length == _MATCHES[0] and not self._num_useless
                num_guesses = min(most, MOST_GUESSES if is_likely else self._num_next)
                found = token_ids[place : place + num_guesses]
                return [found[i % len(found)] for i in range(num_guesses)]  # a match near the end repeats
        return []

    def note(self, num_guessed: int, num_right: int) -> None:
        """How many of the last guesses were right."""
        if num_right == num_guessed:
            self._num_next = min(2 * self._num_next + 1, MOST_GUESSES)
        else:
            self._num_next = max(1, self._num_next // 2)
        if num_right:
            self._num_useless = 0
        else:
            self._pause = min(1 << self._num_useless, _LONGEST_PAUSE)
            self._num_useless += 1

    def _follow(self, token_ids: list[int], length: int, table: npt.NDArray[np.uint32]) -> int:
        """Add the new places, each with the match before it. Returns what the last one has replaced."""
        end = len(token_ids)
        first = max(length, self._num_known + 1)
        if first > end:
            return 0
        if first < end:
            slots = _hashes(token_ids[first - length : -1], length) >> np.uint64(64 - self._bits)
            table[slots] = np.arange(first, end)
        slot = _hash(token_ids[-length:]) >> (64 - self._bits)
        place = int(table[slot])
        table[slot] = end
        return place


def _hash(token_ids: Sequence[int]) -> int:
    value = 0
    for token_id in token_ids:
        value = (value + token_id + 1) * _FACTOR & _MASK
    return value


def _hashes(token_ids: Sequence[int], length: int) -> npt.NDArray[np.uint64]:
    """`_hash` of each `length` tokens in a row."""
    ids = np.array(token_ids, np.uint64) + np.uint64(1)
    num = len(ids) - length + 1
    values = np.zeros(num, np.uint64)
    for i in range(length):
        values = (values + ids[i : i + num]) * np.uint64(_FACTOR)
    return values
