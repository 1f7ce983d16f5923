"""Guessed tokens: what followed the same tokens before, and fewer where that is wrong."""

import itertools
import random

import pytest

from workers.engines.embedded.guesses import MOST_GUESSES, Guesser


def test_the_longest_match_is_followed_and_of_equal_ones_the_latest() -> None:
    older, later = [1, 2, 3, 4, 10, 11, 12], [9, 9, 3, 4, 20, 21, 22]
    assert Guesser(100).guess([*older, *later, 5, 3, 4], 3) == [20, 21, 22]
    assert Guesser(100).guess([*older, *later, 1, 2, 3, 4], 3) == [10, 11, 12]


@pytest.mark.parametrize("num_at_once", [1, 2, 3, 17])
def test_tokens_that_come_in_pieces_are_found_as_those_that_come_at_once(num_at_once: int) -> None:
    rng = random.Random(num_at_once)
    text = [rng.randrange(4) for _ in range(300)]
    growing = Guesser(400)
    for end in range(1, len(text) + 1, num_at_once):
        assert growing.guess(text[:end], 3) == Guesser(400).guess(text[:end], 3)


def test_a_table_too_small_for_its_text_guesses_only_what_was_there() -> None:
    rng = random.Random(5)
    text = [rng.randrange(30) for _ in range(3000)]
    crowded = Guesser(4)  # 16 slots
    for end in range(1, len(text)):
        guessed = crowded.guess(text[:end], 3)
        assert not guessed or (text[end - 1], guessed[0]) in itertools.pairwise(text[:end])


def test_right_guesses_become_more_and_wrong_ones_fewer_until_they_pause() -> None:
    guesser, text, fresh = Guesser(1000), [1, 2, 3], itertools.count(10)
    guesser.guess(text, 100)

    def num_guessed(num_right: int) -> int:
        text.extend([next(fresh), 1, 2, 3])
        num = len(guesser.guess(text, 100))
        if num:
            guesser.note(num, min(num, num_right))
        return num

    assert [num_guessed(100) for _ in range(4)] == [3, 7, 15, MOST_GUESSES]
    assert [num_guessed(1) for _ in range(5)] == [15, 7, 3, 1, 3]
    assert [num_guessed(0) for _ in range(9)] == [1, 0, 1, 0, 0, 1, 0, 0, 0]
