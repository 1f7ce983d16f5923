"""What an engine that does not tell probably has cached."""

from array import array

from workers.engines.prefixes import Chain, HeldPrefixes

LONG = list(range(100, 108))
SHORT = [1, 2, 3, 4]


def test_only_full_blocks_are_held_and_only_under_their_salt() -> None:
    held = HeldPrefixes(4, max_blocks=9)
    held.hold(Chain("a"), [*LONG, 1, 2, 3])
    assert held.num_held([*LONG, 1, 2, 3, 4], "a") == 8
    assert held.num_held([*LONG[:4], 0, *LONG[5:]], "a") == 4
    assert held.num_held(LONG, "b") == 0
    held.hold(Chain("a"), [*SHORT, 9, 9, 9, 9])
    assert held.num_held([*SHORT, *LONG[4:]], "a") == 4, "the KV of a block is that of all before it too"


def test_of_the_least_recently_used_sequence_the_end_is_forgotten_first() -> None:
    held = HeldPrefixes(4, max_blocks=2)
    held.hold(Chain(), LONG)
    held.hold(Chain(), SHORT)
    assert len(held) == 2
    assert (held.num_held(LONG, ""), held.num_held(SHORT, "")) == (4, 4)


def test_no_salt_makes_a_client_the_owner_of_the_blocks_after_anothers() -> None:
    salt = "488231"  # whose key is text, so that it can be part of another salt
    chain = Chain(salt)
    (key,) = chain.follow(SHORT, 4, 4)
    forged = (chain.keys[0] + array("I", SHORT).tobytes()).decode()
    assert Chain(forged).keys[0] != key
