"""Routing policies: pure functions that pick one of the live workers of a role."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from baton.messages import GenerateRequest, Role, WorkerInfo

RouterMode = Literal["round-robin", "random", "least-loaded"]

Pick = Callable[[Role, GenerateRequest, Sequence[WorkerInfo]], WorkerInfo]
"""A policy: picks one of `workers` (not empty, ordered by id) for the request."""


def make_router(mode: RouterMode, num_running: Mapping[str, int]) -> Pick:
    """The policy of that name. `num_running` is a live count of this frontend's calls by worker id."""
    if mode == "random":
        return _pick_random
    if mode == "least-loaded":
        return _least_loaded(num_running)
    return _round_robin()


def _round_robin() -> Pick:
    turns: Counter[tuple[str, Role]] = Counter()

    def pick(role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        turn = turns[request.model, role]
        turns[request.model, role] += 1
        return workers[turn % len(workers)]

    return pick


def _pick_random(_role: Role, _request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
    return random.choice(workers)  # noqa: S311  not security-relevant


def _least_loaded(num_running: Mapping[str, int]) -> Pick:
    ties = _round_robin()

    def pick(role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        least = min(num_running.get(worker.worker_id, 0) for worker in workers)
        return ties(role, request, [w for w in workers if num_running.get(w.worker_id, 0) == least])

    return pick
