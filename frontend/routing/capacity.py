"""How many requests a model's live workers hold, by what they announce."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from baton.messages import WorkerInfo


class Capacity(NamedTuple):
    """How many requests are decoded at a time, how many may be on their way to their first token, how many
    may run (those included), and how many may wait for that.
    """

    num_places: float
    num_starting: float
    num_running: int
    num_waiting: int


def capacity_of(
    prefills: Sequence[WorkerInfo], decodes: Sequence[WorkerInfo], num_processes: int
) -> Capacity | None:
    """A frontend process's part of what the workers hold; None if one does not announce it, or if no decode
    worker is live.

    Workers get a few requests more than their batches hold, so that a place that becomes free is taken at
    once; what else their queues would hold waits in the frontend.
    """
    batch, queue = _total(decodes)
    if not batch:
        return None
    prefill_batch, prefill_queue = _total(prefills)
    ahead = min(queue, prefill_batch or math.ceil(batch / 8))
    most = max(1, (batch + queue) // num_processes)
    num_running = min(batch + ahead, most)
    num_places = batch / num_processes
    if not prefill_batch:
        return Capacity(num_places, math.inf, num_running, most - num_running)
    most_prefilling = max(1, (prefill_batch + prefill_queue) // num_processes)
    num_starting = min(2 * prefill_batch, most_prefilling)
    return Capacity(num_places, num_starting, num_running, min(most - num_running, prefill_queue))


def _total(workers: Sequence[WorkerInfo]) -> tuple[int, int]:
    """The sums of batches and queues; zeros if one is unknown."""
    if any(worker.max_batch_size is None for worker in workers):
        return 0, 0
    return sum(w.max_batch_size or 0 for w in workers), sum(w.max_queue_size for w in workers)
