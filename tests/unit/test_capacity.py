"""How many requests the frontend lets go to workers, and how many wait for that."""

import math

import msgspec
import pytest

from baton.messages import WorkerInfo
from frontend.routing.admission import Capacity, capacity_of
from tests.scripted_workers import worker

Sizes = tuple[int | None, int]
"""(batch, queue)."""


def pool(name: str, *sizes: Sizes) -> list[WorkerInfo]:
    return [
        msgspec.structs.replace(worker(f"{name}{i}"), max_batch_size=batch, max_queue_size=queue)
        for i, (batch, queue) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("prefills", "decodes", "num_processes", "expected"),
    [
        # One in eight more than the batch is on its way to a place that becomes free; the queue waits here.
        ([], [(64, 100)], 1, Capacity(64, math.inf, 72, 92)),
        ([], [(64, 4)], 1, Capacity(64, math.inf, 68, 0)),
        ([], [(64, 0)], 1, Capacity(64, math.inf, 64, 0)),
        # Decode is kept busy while prefill has its own batch in work and one to go on with.
        ([(4, 8)], [(64, 100)], 1, Capacity(64, 8, 68, 8)),
        ([(4, 2)], [(32, 50), (32, 50)], 1, Capacity(64, 6, 68, 2)),
        # Processes share what workers hold, so that none is refused, but need not leave places empty.
        ([], [(8, 256)], 4, Capacity(2, math.inf, 9, 57)),
        ([(8, 8)], [(8, 8)], 4, Capacity(2, 4, 4, 0)),
        ([], [(2, 1)], 4, Capacity(0.5, math.inf, 1, 0)),
        ([(1, 0)], [(8, 8)], 4, Capacity(2, 1, 4, 0)),
        # Workers that do not announce what they hold refuse for themselves.
        ([], [(None, 0)], 1, None),
        ([], [(8, 8), (None, 0)], 1, None),
        ([(None, 0)], [(8, 8)], 1, Capacity(8, math.inf, 9, 7)),
        ([(8, 8)], [], 1, None),
    ],
)
def test_what_the_workers_hold_is_divided(
    prefills: list[Sizes], decodes: list[Sizes], num_processes: int, expected: Capacity | None
) -> None:
    assert capacity_of(pool("p", *prefills), pool("d", *decodes), num_processes) == expected
