"""Load-balancing policies: which of the eligible workers gets a request."""

import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from baton.messages import GenerateRequest, Role, WorkerInfo

RouterMode = Literal["round-robin", "random", "least-loaded", "prefix"]

Pick = Callable[[Role, GenerateRequest, Sequence[WorkerInfo]], WorkerInfo]
"""A policy: picks one of `workers` (not empty, ordered by id) for the request."""

# Of a raw prompt, which has no marked opening.
_RAW_OPENING_TOKENS = 256
# How much more than the mean load a conversation's own worker may have.
_MAX_LOAD = 1.25


Locality = Literal["own", "other"]
"""Whether a conversation stayed on its worker, or spilled over to another."""


def make_router(
    mode: RouterMode,
    num_running: Mapping[str, int],
    count: Callable[[Role, Locality], None] = lambda _role, _place: None,
) -> Pick:
    """The policy of that name. `num_running` is a live count of this frontend's calls by worker id; `count`
    is called with each choice by prefix.
    """
    if mode == "prefix":
        return _prefix(num_running, count)
    if mode == "random":
        return _free_first(_pick_random, num_running)
    return _free_first(_least_loaded(num_running) if mode == "least-loaded" else _round_robin(), num_running)


def _free_first(policy: Pick, num_running: Mapping[str, int]) -> Pick:
    """A request does not queue at one worker while another has a free place."""

    def pick(role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        free = [w for w in workers if num_running.get(w.worker_id, 0) < (w.max_batch_size or math.inf)]
        return policy(role, request, free or workers)

    return pick


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


def _prefix(num_running: Mapping[str, int], count: Callable[[Role, Locality], None]) -> Pick:
    """Each conversation has its own order of workers (rendezvous hashing over its opening tokens), the same
    in every frontend; the first whose load is bounded gets the request (Mirrokni et al., 2018)."""

    def pick(role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        opening = _opening(request)
        ordered = sorted(workers, key=lambda worker: _score(opening, worker), reverse=True)
        loads = [num_running.get(worker.worker_id, 0) for worker in ordered]
        allowed = math.ceil(_MAX_LOAD * (sum(loads) + 1) / len(ordered))
        chosen = next(i for i, load in enumerate(loads) if load < allowed)
        count(role, "other" if chosen else "own")
        return ordered[chosen]

    return pick


def _opening(request: GenerateRequest) -> bytes:
    num_tokens = request.num_opening_tokens or _RAW_OPENING_TOKENS
    key = request.cache_salt.encode()[:64]
    return hashlib.blake2b(array("I", request.token_ids[:num_tokens]).tobytes(), key=key).digest()


def _score(opening: bytes, worker: WorkerInfo) -> bytes:
    return hashlib.blake2b(opening + worker.incarnation.encode(), digest_size=8).digest()
