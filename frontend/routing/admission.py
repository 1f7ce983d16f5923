"""Lets as many requests run as workers hold, others wait in turn or are refused; picks each one's worker."""

import asyncio
import dataclasses
import hashlib
import math
import random
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

from baton.errors import Overloaded
from baton.flags import flag
from baton.messages import GenerateRequest, Role, WorkerInfo
from frontend.metrics import Metrics, Refusal
from frontend.routing.workers import NO_PROGRESS_S


class Capacity(NamedTuple):
    """How many requests are decoded at a time, how many may be on their way to their first token, how many
    may run in all, and how many may wait."""

    num_places: float
    num_starting: float
    num_running: float
    num_waiting: float


UNKNOWN = Capacity(math.inf, math.inf, math.inf, math.inf)


def capacity_of(
    prefills: Sequence[WorkerInfo], decodes: Sequence[WorkerInfo], num_processes: int
) -> Capacity:
    """This process's part of the workers' places; UNKNOWN if a worker does not announce them, or if no decode
    worker is live. Workers get a few requests more than their batches hold, so that a place that becomes free
    is taken at once; what else their queues would hold waits in the frontend."""
    batch, queue = _total(decodes)
    if not batch:
        return UNKNOWN
    prefill_batch, prefill_queue = _total(prefills)
    ahead = min(queue, prefill_batch or math.ceil(batch / 8))
    most = max(1, (batch + queue) // num_processes)
    num_running = min(batch + ahead, most)
    num_places = math.ceil(batch / num_processes)
    if not prefill_batch:
        return Capacity(num_places, math.inf, num_running, most - num_running)
    most_prefilling = max(1, (prefill_batch + prefill_queue) // num_processes)
    num_starting = min(2 * prefill_batch, most_prefilling)
    return Capacity(num_places, num_starting, num_running, min(most - num_running, prefill_queue))


def _total(workers: Sequence[WorkerInfo]) -> tuple[int, int]:
    """The sums of batches and queues; zeros if one is unknown."""
    if None in [worker.max_batch_size for worker in workers]:
        return 0, 0
    return sum([w.max_batch_size or 0 for w in workers]), sum([w.max_queue_size for w in workers])


MAX_WAIT_S = 50.0
"""Of a request in the queue if nothing else is set, and of a client until its next try: proxies give up on a
response without a byte after a minute, and SDKs ignore a longer Retry-After."""
_NEWEST = 0.1  # the least weight of the newest duration in their mean
_SHORTEST_QUEUE_S = 2.0  # a Retry-After has whole seconds, so clients come back in bunches
_CAPACITY_KEPT_S = 0.1
_LOOK_EVERY_S = 1.0


@dataclasses.dataclass(slots=True)
class Place:
    """One request's place, since `began_s`; `is_starting`: it has no token yet."""

    began_s: float
    is_starting: bool = True


Turn = asyncio.Future[Place]


class Admission:
    """The requests of one model in this frontend process. `capacity` is its part of what workers hold, given
    how many requests have a token. A request waits `max_wait_s`, with 0 until its deadline. `on_full` gets
    the pool (`decode`, `prefill`) and its load when a request waits for a second, or is refused."""

    def __init__(
        self,
        capacity: Callable[[int], Capacity],
        metrics: Metrics,
        max_wait_s: float = MAX_WAIT_S,
        on_full: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        self._on_full = on_full
        self._read_capacity = capacity
        self._metrics = metrics
        self._max_wait_s = max_wait_s or math.inf
        self._capacity = UNKNOWN
        self._read_again_s = 0.0
        # By key or address, then by user; the first one's turn is next.
        self.waiting: dict[str, dict[str, list[tuple[int, Turn]]]] = {}
        self._num_waiting = 0
        self._num_starting = 0  # without a token
        self._num_running = 0  # in all
        self._mean_s = 1.0  # of the time that a request has a place
        self._num_ended = 0  # of which it is the mean
        self._booked_s = 0.0  # the last Retry-After ends then

    def check(self, caller: str, deadline_s: float) -> None:
        """Raises Overloaded if a request would be refused now: the queue is full and the caller has its share
        of it, or it would wait too long."""
        self._let_in()  # a worker may have joined
        if self._has_room():
            return
        owner, _, user = caller.partition("\n")
        users = self.waiting.get(owner, {})
        num_mine = len(users.get(user, ()))
        num_callers = (len(self.waiting) + (not users)) * (len(users) + (not num_mine))  # if all are like it
        most = max(self._capacity.num_waiting, round(_SHORTEST_QUEUE_S * self._rate))
        if self._num_waiting >= most and num_mine >= most // num_callers:
            raise self.refusal("queue_full")
        wait_s = min(self._num_waiting, (num_mine + 1) * num_callers) / self._rate
        if wait_s > self._max_wait_s or wait_s + self._mean_s > deadline_s:
            raise self.refusal("too_late")

    async def enter(self, request: GenerateRequest, caller: str) -> Place:
        """A place for the caller's request, after waiting in turn: `start` it at the first token, `leave` it
        at the end. Raises Overloaded as `check` does, or when it has waited too long."""
        self.check(caller, request.deadline_s)
        if self._has_room():
            self._booked_s = 0.0  # the clients that were to come back did not, or will find a place
            return self._take_place()
        turn: Turn = asyncio.get_running_loop().create_future()
        owner, _, user = caller.partition("\n")
        turns = self.waiting.setdefault(owner, {}).setdefault(user, [])
        insort(turns, (request.priority, turn), key=itemgetter(0))
        self._num_waiting += 1
        ends_s = _now_s() + min(self._max_wait_s, request.deadline_s)
        self._metrics.of("queued_requests").value += 1
        try:
            while not turn.done() and (left_s := ends_s - _now_s()) > 0:
                await asyncio.wait([turn], timeout=min(_LOOK_EVERY_S, left_s))
                if not turn.done():
                    self._on_full(*self._load())
                self._let_in()  # a worker may have joined
        except asyncio.CancelledError:
            if turn.done():
                self.leave(turn.result())
            raise
        finally:
            self._metrics.of("queued_requests").value -= 1
            if not turn.done():
                self._take_out(owner, user, turn)
        if not turn.done():
            raise self.refusal("waited")
        return turn.result()

    def start(self, place: Place) -> None:
        """The request has its first token."""
        if place.is_starting:
            place.is_starting = False
            self._num_starting -= 1
            self._let_in()

    def leave(self, place: Place) -> None:
        """The request has ended. How long it had the place counts if it has a token."""
        if not place.is_starting:
            self._num_ended += 1
            weight = max(_NEWEST, 1 / self._num_ended)
            self._mean_s += weight * (_now_s() - place.began_s - self._mean_s)
        self._num_running -= 1
        self._num_starting -= place.is_starting
        self._let_in()

    def refusal(self, reason: Refusal) -> Overloaded:
        """The error of a request without a place. Retry-After is staggered by the rate at which places become
        free, from when the queue is half empty on: clients that come back together are refused again."""
        self._metrics.of("refused_requests", reason).value += 1
        now_s, rate = _now_s(), self._rate
        earliest_s = max(self._booked_s, now_s + self._num_waiting / 2 / rate)
        self._booked_s = min(earliest_s + 1 / rate, now_s + MAX_WAIT_S)
        wait_s, (pool, load) = self._booked_s - now_s, self._load()
        self._on_full(pool, load)
        after_s = max(1, math.ceil(wait_s))
        return Overloaded(
            f"All {pool} workers are busy ({load}). Retry in {after_s} s.", retry_after_s=wait_s
        )

    def _load(self) -> tuple[str, str]:
        """The pool that has no place, and what it does; requests ahead in the workers' own queues wait."""
        most, num_waiting = self._capacity, self._num_waiting
        if self._num_running < most.num_running and self._num_starting >= most.num_starting:
            return "prefill", f"{self._num_starting} running, {num_waiting} waiting"
        num_busy = min(self._num_running, most.num_places)
        return "decode", f"{num_busy} running, {self._num_running - num_busy + num_waiting} waiting"

    def places(self) -> dict[str, tuple[int, float]]:
        """The taken places and all places by kind: `prefill`, before the first token; `running`; `queue`."""
        self._has_room()  # reads the capacity
        most = self._capacity
        return {
            "prefill": (self._num_starting, most.num_starting),
            "running": (self._num_running, most.num_running),
            "queue": (self._num_waiting, most.num_waiting),
        }

    @property
    def _rate(self) -> float:
        """Places that become free in a second (Little's law)."""
        return max(self._num_running, 1) / max(self._mean_s, 1e-3)

    def _has_room(self) -> bool:
        now_s = _now_s()
        if now_s >= self._read_again_s:
            self._capacity = self._read_capacity(self._num_running - self._num_starting)
            self._read_again_s = now_s + _CAPACITY_KEPT_S
        most = self._capacity
        return self._num_running < most.num_running and self._num_starting < most.num_starting

    def _take_place(self) -> Place:
        self._num_running += 1
        self._num_starting += 1
        return Place(_now_s())

    def _let_in(self) -> None:
        while self.waiting and self._has_room():
            owner = next(iter(self.waiting))  # its other requests wait until all others had a turn,
            users = self.waiting[owner] = self.waiting.pop(owner)
            user = next(iter(users))  # and so do those of its user
            turns = users[user] = users.pop(user)
            _, turn = turns[0]
            self._take_out(owner, user, turn)
            turn.set_result(self._take_place())

    def _take_out(self, owner: str, user: str, turn: Turn) -> None:
        users = self.waiting[owner]
        users[user] = [entry for entry in users[user] if entry[1] is not turn]
        if not users[user]:
            del users[user]
        if not users:
            del self.waiting[owner]
        self._num_waiting -= 1


def _now_s() -> float:
    return asyncio.get_running_loop().time()


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
