"""What is drawn at random for an answer: as large as it has to be, and again only where it is asked for."""

import pytest

from frontend.turn.ids import new_call_id, new_id, new_seed, repeatable


def drawn() -> tuple[str, str, int]:
    return new_id("resp"), new_call_id(), new_seed()


def test_ids_have_so_many_bits_that_none_is_guessed_or_comes_again() -> None:
    made, call_id, _ = drawn()
    assert (made[:5], len(made), call_id[:5], len(call_id)) == ("resp_", 5 + 48, "call_", 5 + 32)
    assert new_id("chatcmpl", "-").startswith("chatcmpl-")
    assert 2**62 <= max(new_seed() for _ in range(100)) < 2**63


def test_the_same_is_drawn_for_the_same_key_and_only_until_its_end() -> None:
    with repeatable("a"):
        first = drawn()
    with repeatable("a"):
        second = drawn()
    with repeatable("b"):
        other = drawn()
    assert first == second
    assert not set(first) & set(other)
    with pytest.raises(ConnectionError), repeatable("a"):
        raise ConnectionError
    assert not set(drawn()) & set(first)
    with repeatable("a"):
        with repeatable("b"):
            assert drawn() == other
        assert drawn() == first
