"""Load-balancing policies: which of the eligible workers gets a request."""

import dataclasses
import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from baton.flags import flag
from baton.messages import GenerateRequest, Role, WorkerInfo
from frontend.metrics import Metrics
from frontend.routing.admission import MAX_WAIT_S
from frontend.routing.workers import NO_PROGRESS_S

RouterMode = Literal["round-robin", "random", "least-loaded", "prefix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingSettings:
    """The flags of routing. Prompts of which decode lacks at most `local_prefill_tokens` skip the prefill
    worker while it has kept a request of this process waiting for `local_prefill_after_s`."""

    router_mode: RouterMode = flag(
        "round-robin", "round-robin, random, least-loaded, prefix (by conversation)", metavar="MODE"
    )
    local_prefill_tokens: int = flag(
        0, "prompts of which decode lacks at most N tokens skip the prefill worker", metavar="N", at_least=0
    )
    local_prefill_after_s: float = flag(
        0.0, "only while a request has waited this long for the prefill worker", metavar="S", at_least=0
    )
    max_wait_s: float = flag(
        MAX_WAIT_S, "longest wait while all workers are full; 0: until the deadline", metavar="S", at_least=0
    )
    no_progress_s: float = flag(
        NO_PROGRESS_S, "probe a worker that has made no progress for this long", metavar="S", above=0
    )
    wait_for_worker_s: float = flag(
        15.0, "longest wait for a lost decode worker, or NATS, to return", metavar="S", at_least=0
    )


# Of a raw prompt, which has no marked opening.
_RAW_OPENING_TOKENS = 256
# How much more than the mean load a conversation's own worker may have.
_MAX_LOAD = 1.25


class Router:
    """One policy. `num_running` counts this frontend's calls by worker id."""

    def __init__(self, mode: RouterMode, num_running: Mapping[str, int], metrics: Metrics) -> None:
        self._mode = mode
        self._num_running = num_running
        self._metrics = metrics
        self._turns: Counter[tuple[str, Role]] = Counter()

    def pick(self, role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        """One of `workers` (not empty, ordered by id) for the request. Unless the mode is `prefix`, it does
        not queue at one of them while another has a free place."""
        if self._mode == "prefix":
            return self._by_prefix(role, request, workers)
        loads = self._num_running
        free = [w for w in workers if loads.get(w.worker_id, 0) < (w.max_batch_size or math.inf)] or workers
        if self._mode == "random":
            return random.choice(free)  # noqa: S311  not security-relevant
        if self._mode == "least-loaded":
            least = min(loads.get(worker.worker_id, 0) for worker in free)
            free = [worker for worker in free if loads.get(worker.worker_id, 0) == least]
        turn = self._turns[request.model, role]
        self._turns[request.model, role] += 1
        return free[turn % len(free)]

    def _by_prefix(self, role: Role, request: GenerateRequest, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        """Each conversation has its own order of workers (rendezvous hashing over its opening tokens), the
        same in every frontend; the first whose load is bounded gets the request (Mirrokni et al., 2018)."""
        opening = array("I", request.token_ids[: request.num_opening_tokens or _RAW_OPENING_TOKENS])
        key = hashlib.blake2b(opening.tobytes(), key=request.cache_salt.encode()[:64]).digest()

        def score(worker: WorkerInfo) -> bytes:
            return hashlib.blake2b(key + worker.incarnation.encode(), digest_size=8).digest()

        ordered = sorted(workers, key=score, reverse=True)
        loads = [self._num_running.get(worker.worker_id, 0) for worker in ordered]
        allowed = math.ceil(_MAX_LOAD * (sum(loads) + 1) / len(ordered))
        chosen = next(i for i, load in enumerate(loads) if load < allowed)
        self._metrics.of("prefix_routes", role.value, "other" if chosen else "own").value += 1
        return ordered[chosen]
