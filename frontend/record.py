"""The record of each request: its stages, its attempts on workers, how it ended. No text and no token id."""

import heapq
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Literal, get_args

import msgspec

from baton.messages import KvHandoff, Reply, TokenChunk, Usage, WorkerInfo

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
"""In order. `read`: the body; `render`: the prompt and its tokens; `queue`: until there is a place; the
waits: in a worker's own queue; `transit`: the part of an attempt that no worker accounts for; `send`: the
client did not read."""

MAX_BYTES = 8 << 20
_MAX_NEWEST_BYTES = 4 << 20
_MAX_FAILED_BYTES = 3 << 20
_NUM_SLOWEST = 200
_KEPT_S = 3600.0
"""How long failed and slow requests are kept, if newer ones are not in the way."""
_MAX_NAME = 200
_MAX_ATTEMPTS = 32


class Attempt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One try on workers, which are named. `began_s` counts from the request's arrival. `outcome` is the
    error's code, empty if it answered. `delay_s`: the longest time that a worker's event loop stood still."""

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


class _Timed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Seconds by stage. `stage` runs since `since_s` (a `perf_counter` value); None: none runs."""

    stages: dict[Stage, float] = {}
    stage: Stage | None = None
    since_s: float = 0.0

    def enter(self, stage: Stage | None) -> None:
        """End the running stage, and begin this one."""
        now_s = time.perf_counter()
        if self.stage is not None:
            stages = self.stages_of(self.stage)
            stages[self.stage] = stages.get(self.stage, 0.0) + now_s - self.since_s
        self.stage, self.since_s = stage, now_s

    def stages_of(self, stage: Stage) -> dict[Stage, float]:  # noqa: ARG002  a choice has several
        """Where this stage's time is counted."""
        return self.stages


class Leg(_Timed, kw_only=True, omit_defaults=True):
    """One choice of a request, and its attempts. `gap_s` is the longest time between two tokens, and `gap_at`
    the number of tokens before it."""

    began_s: float
    attempts: list[Attempt] = []
    gap_s: float = 0.0
    gap_at: int = 0
    num_moved_bytes: int | None = None

    def stages_of(self, stage: Stage) -> dict[Stage, float]:
        """Those on workers count for the attempt."""
        return self.attempts[-1].stages if stage in {"prefill", "decode_wait"} else self.stages

    @classmethod
    def beginning(cls, began_s: float | None = None) -> "Leg":
        """That of a choice which waits for a place from now on, of a request that arrived at `began_s`."""
        now_s = time.perf_counter()
        return cls(began_s=now_s if began_s is None else began_s, stage="queue", since_s=now_s)

    def attempt(self) -> None:
        """A new try begins."""
        if len(self.attempts) == _MAX_ATTEMPTS:
            del self.attempts[1]
        self.attempts.append(Attempt(began_s=time.perf_counter() - self.began_s))
        self.enter("decode_wait")

    def on(self, worker: WorkerInfo) -> None:
        """The try uses this worker."""
        setattr(self.attempts[-1], worker.role.value, worker.label)

    def prefilled(self, handoff: KvHandoff) -> None:
        """The prefill worker has answered; the rest of its stage was on the way."""
        self._divide({"prefill_wait": handoff.waited_s, "prefill": handoff.computed_s}, handoff.delay_s)
        self.stage = "decode_wait"

    def decoded(self, first: Reply | None) -> None:
        """The decode worker has answered; the rest of its stage was on the way."""
        usage = first.usage if isinstance(first, TokenChunk) else None
        if usage is not None:
            parts: dict[Stage, float] = {
                "decode_wait": usage.waited_s,
                "kv_move": usage.moved_s,
                "prefill": usage.computed_s,
            }
            self._divide(parts, usage.delay_s)
        self.enter("stream")

    def end(self, usage: Usage | None) -> None:
        """No more tokens come."""
        self.enter(None)
        if usage is not None:
            self.num_moved_bytes = usage.num_moved_bytes
            if self.attempts:
                self.attempts[-1].delay_s = max(self.attempts[-1].delay_s, usage.delay_s)

    def blocked(self, lasted_s: float) -> None:
        """The client did not read for so long while tokens came."""
        self.stages["send"] = self.stages.get("send", 0.0) + lasted_s
        self.since_s += lasted_s

    def spent(self, now_s: float) -> dict[Stage, float]:
        """Seconds by stage in all attempts."""
        found = dict(self.stages)
        for stage, lasted_s in chain.from_iterable(attempt.stages.items() for attempt in self.attempts):
            found[stage] = found.get(stage, 0.0) + lasted_s
        if self.stage is not None:
            found[self.stage] = found.get(self.stage, 0.0) + now_s - self.since_s
        return found

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


class Record(_Timed, kw_only=True, omit_defaults=True):
    """One request. `at_s` is its arrival as Unix time, `began_s` the same as a `perf_counter` value;
    durations and `first_token_s` count from then. `caller` is the API key's name. `status` is the HTTP
    status, or that of the error that ended a stream; `code` the error's. `delay_s`: the longest time that
    this frontend's event loop stood still meanwhile."""

    request_id: str
    route: str
    at_s: float
    began_s: float
    model: str = ""
    caller: str = ""
    status: int = 200
    code: str = ""
    duration_s: float | None = None
    first_token_s: float | None = None
    legs: list[Leg] = []
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    repairs: Mapping[str, int] = {}
    disconnected: bool = False
    delay_s: float = 0.0

    def leg(self) -> Leg:
        """A new choice's part."""
        self.enter(None)
        self.legs.append(Leg.beginning(self.began_s))
        return self.legs[-1]

    @property
    def num_attempts(self) -> int:
        """Tries on workers, of all choices."""
        return sum(len(leg.attempts) for leg in self.legs)

    def spent(self) -> dict[Stage, float]:
        """Seconds by stage, until now for one that runs; of several choices, those of the slowest."""
        now_s = time.perf_counter()
        found = max((leg.spent(now_s) for leg in self.legs), key=lambda each: sum(each.values()), default={})
        found |= self.stages
        if self.stage is not None:
            found[self.stage] = now_s - self.since_s
        return {stage: found[stage] for stage in STAGES if stage in found}


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
    """This process's: those that run, the newest, the slowest and the failed, in at most MAX_BYTES."""

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

    def end(self, record: Record) -> float:
        """Keep what has ended. Returns its duration."""
        self._running.pop(id(record), None)
        record.enter(None)
        record.duration_s = record.since_s - record.began_s
        data = _ENCODER.encode(record)
        self._newest.add(data)
        if record.status >= 400 or record.num_attempts > len(record.legs):
            self._failed.add(data)
        if len(self._slowest) < _NUM_SLOWEST or record.duration_s > self._slowest[0][0]:
            self._note_slow(record.duration_s, record.since_s, data)
        return record.duration_s

    def _note_slow(self, duration_s: float, ended_s: float, data: bytes) -> None:
        heapq.heappush(self._slowest, (duration_s, ended_s, data))
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
