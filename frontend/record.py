"""The record of each request: its stages, its attempts on workers, how it ended. No text and no token id."""

import heapq
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Literal, get_args

import msgspec

from baton.messages import KvHandoff, Usage, WorkerInfo

Stage = Literal[
    "read",
    "render",
    "queue",
    "prefill_wait",
    "prefill",
    "decode_wait",
    "kv_move",
    "transit",
    "stream",
    "send",
]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In order. `read`: the body; `render`: the prompt and its tokens; `queue`: until admission gives a place; the waits:
in a worker's own queue; `transit`: the part of an attempt that no worker accounts for; `send`: the client did not
read."""

MAX_BYTES = 8 << 20
_MAX_NEWEST_BYTES = 4 << 20
_MAX_FAILED_BYTES = 3 << 20
_NUM_SLOWEST = 200
_KEPT_S = 3600.0
"""How long failed and slow requests are kept, if newer ones are not in the way."""
_MAX_NAME = 200
_MAX_ATTEMPTS = 32


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One try on workers, which are named. `began_s` counts from the request's arrival. `outcome` is the error's code,
    empty if it answered. `delay_s`: the longest time that a worker's event loop stood still meanwhile."""

    began_s: float
    prefill: str = ""
    decode: str = ""
    stages: dict[Stage, float] = {}
    outcome: str = ""
    delay_s: float = 0.0

    def worker(self, stage: Stage) -> str:
        """The worker on which this stage runs; without a handoff decode computes the prompt."""
        return (
            self.prefill if self.prefill and stage in {"prefill_wait", "prefill", "transit"} else self.decode
        )


class Leg(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One choice of a request. `stage` runs since `since_s` (a `perf_counter` value), None once it has ended;
    `gap_s` is the longest time between two tokens, and `gap_at` the number of tokens before it."""

    began_s: float
    stages: dict[Stage, float] = {}
    attempts: list[Attempt] = []
    stage: Stage | None = None
    since_s: float = 0.0
    gap_s: float = 0.0
    gap_at: int = 0

    def enter(self, stage: Stage | None) -> None:
        """End the running stage, and begin this one."""
        now_s = time.perf_counter()
        if self.stage is not None:
            is_attempts = self.stage in {"prefill", "decode_wait", "kv_move"}
            stages = self.attempts[-1].stages if is_attempts else self.stages
            stages[self.stage] = stages.get(self.stage, 0.0) + now_s - self.since_s
        self.stage, self.since_s = stage, now_s

    def attempt(self, prefill: WorkerInfo | None, decode: WorkerInfo | None) -> None:
        """A new try begins on these workers."""
        first: Stage = "decode_wait" if prefill is None else "prefill"
        self.enter(first)
        if len(self.attempts) == _MAX_ATTEMPTS:
            del self.attempts[1]
        names = {"prefill": prefill and prefill.worker_id, "decode": decode and decode.worker_id}
        known = {role: name for role, name in names.items() if name}
        self.attempts.append(Attempt(began_s=self.since_s - self.began_s, **known))

    def prefilled(self, handoff: KvHandoff) -> None:
        """The prefill worker has answered; the rest of its stage was on the way."""
        self._divide({"prefill_wait": handoff.waited_s, "prefill": handoff.computed_s}, handoff.delay_s)
        self.stage = "decode_wait"

    def decoded(self, usage: Usage | None) -> None:
        """The decode worker has answered; the rest of its stage was on the way."""
        if usage is not None:
            parts = {"decode_wait": usage.waited_s, "kv_move": usage.moved_s, "prefill": usage.computed_s}
            self._divide(parts, usage.delay_s)
        self.enter("stream")

    def failed(self, code: str) -> None:
        """The try has ended with this error; the request waits for the next one."""
        self.enter("queue")
        if self.attempts:
            self.attempts[-1].outcome = code

    def _divide(self, parts: dict[Stage, float], delay_s: float) -> None:
        now_s, attempt = time.perf_counter(), self.attempts[-1]
        for stage, lasted_s in parts.items():
            if lasted_s:
                attempt.stages[stage] = attempt.stages.get(stage, 0.0) + lasted_s
        rest_s = now_s - self.since_s - sum(parts.values())
        attempt.stages["transit"] = attempt.stages.get("transit", 0.0) + max(0.0, rest_s)
        attempt.delay_s = max(attempt.delay_s, delay_s)
        self.since_s = now_s


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. `at_s` is its arrival as Unix time, `began_s` the same as a `perf_counter` value; durations and
    `first_token_s` count from then. `caller` is the API key's name. `status` is the HTTP status, or that of the error
    that ended a stream, 0 while it runs; `code` the error's. `delay_s`: the longest time that this frontend's event
    loop stood still meanwhile."""

    request_id: str
    route: str
    at_s: float
    began_s: float
    model: str = ""
    caller: str = ""
    status: int = 0
    code: str = ""
    duration_s: float = 0.0
    first_token_s: float | None = None
    stages: dict[Stage, float] = {}
    legs: list[Leg] = []
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_moved_bytes: int = 0
    is_disconnected: bool = False
    delay_s: float = 0.0

    def leg(self) -> Leg:
        """A new choice's part."""
        now_s = time.perf_counter()
        self.legs.append(Leg(began_s=self.began_s, stage="queue", since_s=now_s))
        return self.legs[-1]

    @property
    def num_attempts(self) -> int:
        """Tries on workers, of all choices."""
        return sum(len(leg.attempts) for leg in self.legs)

    def spent(self) -> dict[Stage, float]:
        """Seconds by stage, until now for the running one; of several choices, those of the slowest."""
        now_s = time.perf_counter()
        slowest: dict[Stage, float] = {}
        for leg in self.legs:
            found = dict(leg.stages)
            for stage, lasted_s in chain.from_iterable(attempt.stages.items() for attempt in leg.attempts):
                found[stage] = found.get(stage, 0.0) + lasted_s
            if leg.stage is not None:
                found[leg.stage] = found.get(leg.stage, 0.0) + now_s - leg.since_s
            slowest = max(slowest, found, key=lambda each: sum(each.values()))
        return {
            stage: (self.stages | slowest)[stage]
            for stage in STAGES
            if stage in self.stages or stage in slowest
        }


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)


class _Ring:
    """The newest encoded records, `max_bytes` of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: deque[bytes] = deque()

    def add(self, data: bytes) -> None:
        self._kept.append(data)
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft())

    def __iter__(self) -> Iterator[bytes]:
        return reversed(self._kept)


class Records:
    """The records of this process: those that run, the newest, the slowest and the failed, in at most MAX_BYTES."""

    def __init__(self) -> None:
        self._running: dict[int, Record] = {}
        self._newest = _Ring(_MAX_NEWEST_BYTES)
        self._failed = _Ring(_MAX_FAILED_BYTES)
        self._slowest: list[tuple[float, float, bytes]] = []  # a heap: (duration, end, record)

    def begin(self, request_id: str, route: str, caller: str) -> Record:
        """The record of a request that arrives now."""
        now_s = time.perf_counter()
        record = Record(
            request_id=request_id[:_MAX_NAME],
            route=route,
            caller=caller[:_MAX_NAME],
            at_s=time.time(),
            began_s=now_s,
        )
        self._running[id(record)] = record
        return record

    def end(self, record: Record) -> None:
        """Keep what has ended."""
        self._running.pop(id(record), None)
        record.duration_s = time.perf_counter() - record.began_s
        data = _ENCODER.encode(record)
        self._newest.add(data)
        if record.status >= 400 or record.num_attempts > len(record.legs):
            self._failed.add(data)
        if len(self._slowest) < _NUM_SLOWEST or record.duration_s > self._slowest[0][0]:
            self._note_slow(record, data)

    def _note_slow(self, record: Record, data: bytes) -> None:
        ended_s = record.began_s + record.duration_s
        heapq.heappush(self._slowest, (record.duration_s, ended_s, data))
        if len(self._slowest) > _NUM_SLOWEST:
            fresh = [each for each in self._slowest if each[1] > ended_s - _KEPT_S]
            self._slowest = fresh
            heapq.heapify(self._slowest)
            if len(fresh) > _NUM_SLOWEST:
                heapq.heappop(self._slowest)

    def running(self) -> list[Record]:
        """Those that have not ended, the oldest first."""
        return list(self._running.values())

    def newest(self, limit: int) -> Iterator[Record]:
        """Those that ended last, the newest first."""
        return (_DECODER.decode(data) for data, _ in zip(self._newest, range(limit), strict=False))

    def find(self, request_id: str) -> list[Record]:
        """All that have this id, which a client may give to several; the newest first."""
        wanted = request_id.encode()
        found = [record for record in self._running.values() if record.request_id == request_id]
        kept = dict.fromkeys(chain(self._newest, self._failed, (each[2] for each in self._slowest)))
        decoded = (_DECODER.decode(data) for data in kept if wanted in data)
        found += (record for record in decoded if record.request_id == request_id)
        return sorted(found, key=lambda record: -record.at_s)

    def slowest(self, limit: int) -> list[Record]:
        """Those that took longest, the slowest first."""
        return [_DECODER.decode(data) for _, _, data in heapq.nlargest(limit, self._slowest)]

    def failed(self, limit: int) -> list[Record]:
        """Those that failed, or were tried again, the newest first."""
        return [_DECODER.decode(data) for data, _ in zip(self._failed, range(limit), strict=False)]
