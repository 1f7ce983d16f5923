"""Which guesses count: those that their places draw, as if each token had had a step of its own."""

import random

import pytest
import torch

from workers.engines.vllm.patches.draws import accept


@pytest.mark.parametrize(
    ("drawn", "guessed", "expected"),
    [
        ([7, 8, 9, 5], [7, 8, 9], [7, 8, 9, 5]),
        ([7, 8, 9, 5], [7, 0, 9], [7, 8]),
        ([7, 8, 9, 5], [0, 8, 9], [7]),
        ([7], [], [7]),
        ([7, 8], [-1], [7]),
    ],
)
def test_guesses_count_up_to_the_first_wrong_one(
    drawn: list[int], guessed: list[int], expected: list[int]
) -> None:
    ends = torch.tensor([0, len(drawn)], dtype=torch.int32)
    rows, nums = accept(torch.tensor(drawn), torch.tensor([3, *guessed], dtype=torch.int32), ends, 3)
    assert rows[0, : nums[0]].tolist() == expected


def test_requests_with_unlike_numbers_of_guesses_have_their_own_draws() -> None:
    """Against the rule, request by request; the last two rows pad a batch."""
    rng = random.Random(4)
    drawn, inputs, ends, expected = [], [], [0], []
    for num in [3, 0, 1, 3, 2, 0, 3]:
        draws, guesses = ([rng.randrange(2) for _ in range(n)] for n in (num + 1, num))
        num_right = next((i for i, guess in enumerate(guesses) if guess != draws[i]), num)
        expected.append(draws[: num_right + 1])
        drawn += draws
        inputs += [9, *guesses]
        ends.append(len(drawn))
    rows, nums = accept(
        torch.tensor(drawn), torch.tensor(inputs), torch.tensor([*ends, ends[-1], ends[-1]]), 3
    )
    found = [row[:num].tolist() for row, num in zip(rows, nums.tolist(), strict=True)]
    assert found[: len(expected)] == expected
    assert nums.dtype == torch.int32
