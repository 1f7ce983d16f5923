"""The record of each request: its stages, its attempts on workers, how it ended. No text and no token id."""

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush, nlargest
from itertools import chain, islice
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from baton.loop_delay import LoopDelay
from baton.messages import KvHandoff, Reply, Role, TokenChunk, Usage, WorkerInfo

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


class Rule(NamedTuple):
    """What it means that this is out of line, and what helps; the names in it are of workers. Until enough
    requests have ended `most_s` is allowed, and `per_token_s` of the tokens `by` which it grows. Of a `wait`
    nothing is usual: one that all requests have is out of line too.

    Of a stage, `group` is how the page draws it; those of `client` are the request's, all others of its
    attempts. It runs on the worker of role `on`, or on the other one if that did both."""

    cause: str
    help: str
    group: Literal["", "client", "wait", "compute", "move", "transit", "stream"] = ""
    on: Literal["", "prefill", "decode"] = ""
    by: Literal["", "computed", "generated"] = ""
    per_token_s: float = 0.0
    most_s: float = 0.5


_MORE = "another worker, or larger batches"
HOST = "a look at the host of {worker}: CPU, swap, network"
LINK = "a look at the network between them"

STAGES: Mapping[Stage, Rule] = {
    "read": Rule("the client sent its body slowly", "a faster client, or a smaller body", "client"),
    "render": Rule("the prompt was long to render and tokenize", "a shorter prompt, or more CPU", "client"),
    "queue": Rule("all workers were busy", _MORE, "wait"),
    "prefill_wait": Rule("{worker} was busy with other prompts", _MORE, "wait", "prefill"),
    "prefill": Rule(
        "{worker} computed the prompt or a grammar slowly", HOST, "compute", "prefill", "computed", 5e-4, 1.0
    ),
    "decode_wait": Rule("{worker} was full", _MORE, "wait", "decode"),
    "kv_move": Rule("KV moved slowly from {prefill} to {decode}", LINK, "move", "decode", "computed", 1e-4),
    "transit": Rule("{worker} stood still, or the network to it", HOST, "transit", "decode"),
    "stream": Rule(
        "{worker} sent its tokens slowly", _MORE, "stream", "decode", "generated", math.inf, math.inf
    ),
    "send": Rule("the client did not read what was sent", "a faster client or network", "client"),
}
"""See the glossary."""


MAX_BYTES = 8 << 20
_OVERHEAD_BYTES = 100
"""Of a kept record beside its data: the objects around it."""
_KEPT_S = 3600.0
"""How long slow requests are kept; one that much older makes room for one 2.7 times as short."""
_MAX_NAME = 200
_MAX_ATTEMPTS = 32


class _Timed(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Seconds by stage. `stage` runs since `since_s` (a `perf_counter` value); None: none runs."""

    stages: dict[Stage, float] = {}
    stage: Stage | None = None
    since_s: float = 0.0

    def enter(self, stage: Stage | None) -> None:
        """End the running stage, and begin this one."""
        now_s, ended = time.perf_counter(), self.stage
        if ended is not None:
            lasted_s, stages = now_s - self.since_s, self.stages
            stages[ended] = stages[ended] + lasted_s if ended in stages else lasted_s
        self.stage, self.since_s = stage, now_s


def _sums(now_s: float, parts: Iterable[_Timed]) -> dict[Stage, float]:
    """Seconds by stage in all parts; the running ones until now."""
    found: dict[Stage, float] = {}
    for part in parts:
        running = [] if part.stage is None else [(part.stage, now_s - part.since_s)]
        for stage, lasted_s in (*part.stages.items(), *running):
            found[stage] = found.get(stage, 0.0) + lasted_s
    return found


class Attempt(_Timed, kw_only=True, omit_defaults=True, gc=False):
    """One try on workers, after the wait for a place: their names, and id, host and process of each.
    `outcome` is the error's code, empty if it answered, `absent` the code of the error while it waited for a
    worker or the broker. `delay_s`: the longest time that a worker's event loop stood still; `starved_s`: of
    those of both workers together, how long without a CPU; `late`: the worker whose answer was in transit the
    longest."""

    prefill: str = ""
    decode: str = ""
    prefill_at: str = ""
    decode_at: str = ""
    absent: str = ""
    outcome: str = ""
    ended_in: Stage | None = None
    num_tokens: int = 0
    delay_s: float = 0.0
    starved_s: float = 0.0
    late: str = ""

    @property
    def has_workers(self) -> bool:
        """Whether it reached one."""
        return bool(self.prefill or self.decode)

    @property
    def waited_s(self) -> float:
        """How long it was on workers without a token."""
        return sum(took_s for stage, took_s in self.stages.items() if STAGES[stage].on and stage != "stream")

    def worker(self, stage: Stage) -> str:
        """The worker on which this stage runs; each of them may do without the other."""
        if stage == "transit" and self.late:
            return self.late
        on, first, second = STAGES[stage].on, self.prefill, self.decode
        return on and ((first or second) if on == "prefill" else (second or first))


class Leg(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One choice of a request: its attempts, one after the other. `gap_s` is the longest time between two
    tokens, and `gap_at` the number of tokens before it. `progress`: the tokens so far; until it ends also
    when the last chunk arrived, and when the client had taken it, in ns."""

    attempts: list[Attempt]
    gap_s: float = 0.0
    gap_at: int = 0
    progress: list[int] = []
    num_moved_bytes: int | None = None

    @classmethod
    def since(cls, now_s: float) -> "Leg":
        """That of a request that waits for a place since then."""
        return cls(attempts=[Attempt(stage="queue", since_s=now_s)])

    def on(self, worker: WorkerInfo) -> None:
        """The attempt now waits for this worker."""
        attempt = self.attempts[-1]
        name, at = worker.label, f"{worker.worker_id}, {worker.host}, pid {worker.pid}"
        if worker.role is Role.PREFILL:
            attempt.prefill, attempt.prefill_at = name, at
            attempt.enter("prefill")
        else:
            attempt.decode, attempt.decode_at = name, at
            if attempt.stage == "queue":
                attempt.enter("decode_wait")

    def answered(self, first: Reply | None) -> None:
        """A worker has answered: with a handoff, and decode is next, or with the first tokens. What its own
        durations leave of the stage was in transit. With None, the attempt goes on to its failure."""
        attempt = self.attempts[-1]
        found = first.usage if type(first) is TokenChunk else first  # isinstance takes longer
        if type(found) is not KvHandoff and type(found) is not Usage:
            if first is not None:
                attempt.enter("stream")
            return
        wait: Stage = "prefill_wait" if attempt.stage == "prefill" else "decode_wait"
        now_s, stages = time.perf_counter(), attempt.stages
        rest_s = now_s - attempt.since_s
        moved_s = found.moved_s if type(found) is Usage else 0.0
        move: Stage = "kv_move"
        for stage, lasted_s in ((wait, found.waited_s), (move, moved_s), ("prefill", found.computed_s)):
            if lasted_s > 0.0:
                counted_s = min(lasted_s, rest_s)
                stages[stage] = stages.get(stage, 0.0) + counted_s
                rest_s -= counted_s
        before_s = stages.get("transit", 0.0)
        if rest_s > before_s:
            attempt.late = attempt.worker(wait)
        stages["transit"] = before_s + rest_s
        attempt.stage, attempt.since_s = "decode_wait" if found is first else "stream", now_s
        attempt.delay_s = max(attempt.delay_s, found.delay_s)
        attempt.starved_s += found.starved_s

    def failed(self, code: str, num_tokens: int = 0) -> Attempt:
        """The attempt, which ended with this error after so many tokens; another one begins to wait."""
        attempt = self.attempts[-1]
        attempt.outcome, attempt.num_tokens, attempt.ended_in = code, num_tokens, attempt.stage
        attempt.enter(None)
        self.attempts.append(Attempt(stage="queue", since_s=attempt.since_s))
        if len(self.attempts) > _MAX_ATTEMPTS:  # one less, whose time the next one waited
            waits = self.attempts[2].stages
            waits["queue"] = waits.get("queue", 0.0) + sum(self.attempts.pop(1).stages.values())
        return attempt

    def end(self, usage: Usage | None = None) -> float:
        """No more tokens come; returns since when."""
        attempt = self.attempts[-1]
        if attempt.stage is not None:
            if attempt.stage not in {"queue", "stream"}:
                attempt.ended_in = attempt.stage
            attempt.enter(None)
        self.progress = self.progress[:1]
        if usage is not None:
            self.num_moved_bytes = usage.num_moved_bytes
            attempt.delay_s = max(attempt.delay_s, usage.delay_s)
            attempt.starved_s = max(attempt.starved_s, usage.starved_s)
        return attempt.since_s

    def blocked(self, lasted_s: float) -> None:
        """The client did not read for so long; the running stage has that much less."""
        attempt = self.attempts[-1]
        lasted_s = min(lasted_s, time.perf_counter() - attempt.since_s)
        attempt.stages["send"] = attempt.stages.get("send", 0.0) + lasted_s
        attempt.since_s += lasted_s


class Trace(NamedTuple):
    """A request's span in a trace, as W3C's `traceparent`, which ends with 1 if the span is sent; and its
    parent's id, if it has one."""

    own: str
    parent_id: str = ""


class Record(_Timed, kw_only=True, omit_defaults=True, gc=False):
    """One request. `at_s` is its arrival as Unix time, `began_s` the same as a `perf_counter` value;
    durations and `first_token_s` count from then. `caller` is the API key's name, `address` the
    client's. `status` is the HTTP status, or that of the error that ended a stream; `code` the error's.
    `delay_s`: the longest time that this frontend's event loop stood still meanwhile, of which `starved_s`
    without a CPU; `cpu_wait_s`: how long it waited for a CPU in all. Of one `so_far`: `status` is 0, `now`
    the running stage."""

    request_id: str
    route: str
    at_s: float
    began_s: float
    model: str = ""
    caller: str = ""
    address: str = ""
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
    starved_s: float = 0.0
    cpu_wait_s: float = 0.0
    trace: Trace | None = None
    now: Stage | None = None

    def leg(self) -> Leg:
        """A new choice's part."""
        if self.stage is not None:
            self.enter(None)
        leg = Leg.since(self.since_s)
        self.legs.append(leg)
        return leg

    def generated(self) -> None:
        """All choices have ended; the rest is sent, since the last one's end."""
        self.enter("send")
        if self.legs:
            self.since_s = max([leg.end() for leg in self.legs])

    @property
    def attempts(self) -> list[Attempt]:
        """Tries that reached workers, of all choices."""
        return [attempt for leg in self.legs for attempt in leg.attempts if attempt.has_workers]

    @property
    def running(self) -> list[Stage]:
        """The stages that it and its choices are in now."""
        parts = (self, *(leg.attempts[-1] for leg in self.legs))
        return [part.stage for part in parts if part.stage is not None]

    @property
    def gap_s(self) -> float:
        """The longest time between two tokens of any choice."""
        return max((leg.gap_s for leg in self.legs), default=0.0)

    def spent(self) -> dict[Stage, float]:
        """Seconds by stage, until now for one that runs; of several choices, those of the slowest."""
        now_s = time.perf_counter()
        choices = [_sums(now_s, (self, *leg.attempts)) for leg in self.legs] or [_sums(now_s, [self])]
        found = max(choices, key=lambda each: sum(each.values()))
        return {stage: found[stage] for stage in STAGES if stage in found}

    def end(self) -> None:
        """No stage runs any more."""
        if self.stage != "send":  # else they have ended
            for leg in self.legs:
                leg.end()
        self.enter(None)
        self.duration_s = self.since_s - self.began_s

    def so_far(self) -> "Record":
        """A copy, as if it ended now."""
        copy = _DECODER.decode(_ENCODER.encode(self))
        copy.status, copy.now = 0, next(reversed(self.running), None)
        for leg in copy.legs:
            waited_s = time.perf_counter() - max(leg.progress, default=0) / 1e9
            if leg.progress[2:] < leg.progress[1:2]:
                leg.blocked(waited_s)
            elif any(leg.progress[2:]) and waited_s > leg.gap_s:
                leg.gap_s, leg.gap_at = waited_s, leg.progress[0]
        copy.num_choices = max(1, len(copy.legs))
        copy.num_completion_tokens = sum(sum(leg.progress[:1]) for leg in copy.legs)
        copy.end()
        return copy


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Record)


class _Newest:
    """Encoded records in the order of their end, as many as fit."""

    def __init__(self, max_bytes: int) -> None:
        self.data = deque[bytes]()
        self._room_bytes = max_bytes

    def add(self, data: bytes) -> None:
        self.data.append(data)
        self._room_bytes -= len(data) + _OVERHEAD_BYTES
        while self._room_bytes < 0:
            self._room_bytes += len(self.data.popleft()) + _OVERHEAD_BYTES


class Records:
    """This process's: those that run, the newest, the slowest and the failed, in about MAX_BYTES. `delays`
    are those of its event loop."""

    def __init__(self) -> None:
        self.delays = LoopDelay()
        self._running: dict[int, tuple[Record, float]] = {}  # and what the loop was starved until its begin
        self._newest, self._failed = _Newest(4 << 20), _Newest(3 << 20)
        self._slowest: list[tuple[float, float, float, bytes]] = []  # a heap by how long and when
        self._slow_room_bytes, self._least_key = 1 << 20, -math.inf

    def begin(self, route: str, request_id: str = "", caller: str = "") -> Record:
        """The record of a request that arrives now."""
        now_s = time.perf_counter()
        record = Record(request_id=request_id[:_MAX_NAME], route=route, at_s=time.time(), began_s=now_s)
        record.caller, record.since_s = caller[:_MAX_NAME], now_s
        self._running[id(record)] = record, self.delays.starved_s
        return record

    def end(self, record: Record) -> None:
        """The request has ended."""
        _, before_s = self._running.pop(id(record), (record, self.delays.starved_s))
        record.end()
        self._measure(record, before_s)
        self.keep(record)

    def _measure(self, record: Record, before_s: float) -> None:
        if (delay := self.delays.longest(record.began_s)).lasted_s:
            record.delay_s, record.starved_s = delay
        record.cpu_wait_s = max(self.delays.starved_s - before_s, record.starved_s)

    def keep(self, record: Record) -> None:
        """Keep what has ended."""
        data, duration_s = _ENCODER.encode(record), record.duration_s or 0.0
        self._newest.add(data)
        if record.status >= 400 or [leg for leg in record.legs if len(leg.attempts) > 1]:
            self._failed.add(data)
        ended_s = record.at_s + duration_s
        key = math.log(duration_s + 1e-9) + ended_s / _KEPT_S
        if key > self._least_key:
            heappush(self._slowest, (key, duration_s, ended_s, data))
            self._slow_room_bytes -= len(data) + _OVERHEAD_BYTES
            while self._slow_room_bytes < 0:
                self._least_key, *_, dropped = heappop(self._slowest)
                self._slow_room_bytes += len(dropped) + _OVERHEAD_BYTES

    def newest(self, limit: int, *, failed: bool = False) -> list[Record]:
        """Those that ended last, the newest first; or of those that failed, or of which an attempt did."""
        kept = self._failed if failed else self._newest
        return [_DECODER.decode(data) for data in islice(reversed(kept.data), limit)]

    def slowest(self, limit: int, within_s: float = _KEPT_S) -> list[Record]:
        """Those that took longest of so many seconds, the slowest first."""
        since_s = time.time() - within_s
        recent = [each[1:] for each in self._slowest if each[2] > since_s]
        return [_DECODER.decode(data) for _, _, data in nlargest(limit, recent)]

    def running(self) -> list[Record]:
        """Those that have not ended, the oldest first."""
        for each in self._running.values():
            self._measure(*each)
        return [record for record, _ in self._running.values()]

    def find(self, request_id: str, limit: int) -> list[Record]:
        """Those that have this id, which a client may give to many; the newest first."""
        request_id = request_id[:_MAX_NAME]
        wanted = _ENCODER.encode("request_id") + _ENCODER.encode(request_id)
        slowest = (data for *_, data in self._slowest)
        kept = chain(reversed(self._newest.data), reversed(self._failed.data), slowest)
        ended = dict.fromkeys(data for data in kept if wanted in data)
        found = [each for each in self.running() if each.request_id == request_id]
        found += map(_DECODER.decode, islice(ended, limit))  # not all: that would stop the event loop
        return sorted(found, key=attrgetter("at_s"), reverse=True)[:limit]
