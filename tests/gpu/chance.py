"""A significance test for counts of equal answers."""

from math import comb

RARE = 0.002  # a run has twenty comparisons


def as_many(num_found: int, num_control: int, num: int) -> bool:
    """Whether `num_found` of `num` are not significantly fewer than `num_control` of `num`.

    Fisher's exact test, one-sided."""
    both = num_found + num_control
    so_few = sum(comb(num, k) * comb(num, both - k) for k in range(max(0, both - num), num_found + 1))
    return so_few / comb(2 * num, both) > RARE
