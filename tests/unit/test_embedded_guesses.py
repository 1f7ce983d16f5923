"""Guessed tokens: what followed the same tokens before, and fewer where that is wrong."""

import itertools
import random

import pytest

from workers.engines.embedded.guesses import MOST_GUESSES, Guesser

TEXT = [7, 3, 9, 4, 8, 1, 6, 2, 5, 0]


def test_the_longest_match_is_followed_and_of_equal_ones_the_latest() -> None:
    older, later = [1, 2, 3, 4, 10, 11, 12], [9, 9, 3, 4, 20, 21, 22]
    assert Guesser(100).guess([*older, *later, 5, 3, 4], 3) == [20, 21, 22]
    assert Guesser(100).guess([*older, *later, 1, 2, 3, 4], 3) == [10, 11, 12]


def test_one_equal_token_is_not_enough() -> None:
    assert Guesser(100).guess([1, 2, 3, 4, 9, 2], 3) == []


def test_a_match_at_the_end_goes_on_in_its_rhythm() -> None:
    assert Guesser(100).guess([5, 1, 2, 3, 1, 2, 3, 1, 2], 3) == [3, 1, 2]


def test_the_longest_match_allows_the_most_at_once_until_it_is_useless() -> None:
    guesser, text = Guesser(100), [*TEXT, *TEXT[:8]]
    assert guesser.guess(text, 100) == [*TEXT[8:], *TEXT[:8], *TEXT[8:], *TEXT[:3]]
    guesser.note(MOST_GUESSES, 0)
    text.append(TEXT[8])
    assert guesser.guess(text, 100) == []
    text.append(TEXT[9])
    assert guesser.guess(text, 100) == TEXT[:1]


def test_no_more_is_guessed_than_is_allowed() -> None:
    assert Guesser(100).guess([*TEXT, *TEXT[:4]], 2) == TEXT[4:6]


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
