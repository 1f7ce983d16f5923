"""Ids of handoffs: unique, independent of the clock."""

from itertools import chain, repeat

from hypothesis import given
from hypothesis import strategies as st
from workers.engines.trtllm.ids import HandoffIds

NOW_MS = 1_795_000_000_000


@given(st.lists(st.integers(NOW_MS - 5, NOW_MS + 5), min_size=1, max_size=50))
def test_a_clock_that_goes_back_gives_no_id_twice(times_ms: list[int]) -> None:
    clock = chain(times_ms, repeat(NOW_MS))
    ids = HandoffIds(lambda: next(clock))

    found = [ids.next() for _ in range(3000)]

    assert len(set(found)) == len(found)


def test_ids_are_positive_64_bit_numbers_from_2_to_the_40th_on() -> None:
    ids = HandoffIds()

    assert all(1 << 40 <= ids.next() < 1 << 63 for _ in range(100))


def test_two_incarnations_at_the_same_time_differ() -> None:
    workers = [HandoffIds(lambda: NOW_MS) for _ in range(20)]

    assert (
        len({worker.next() >> 10 for worker in workers}) > 15
    )  # of 2^14 random parts, whatever the counters


def test_ids_of_one_incarnation_share_its_random_part() -> None:
    ids = HandoffIds(lambda: 1_750_000_000_000)
    assert len({(ids.next() >> 10) & ((1 << 14) - 1) for _ in range(3000)}) == 1
