"""What the fleet does, and did in the last five minutes: made at most once a second for all who look."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec

from baton.errors import NotReady, WorkerLost
from baton.messages import Role, WorkerInfo, WorkerStats
from baton.pace import Pulse
from baton.pairing import why_not_paired
from frontend.metrics import Metrics
from frontend.record import Record
from frontend.routing.events import FleetEvent
from frontend.routing.workers import State
from frontend.verdict import Usual, verdict

if TYPE_CHECKING:  # its tokenizers are not needed to read a snapshot
    from frontend.routing.fleet import Fleet

EVERY_S = 1.0
SPAN_S = 300
"""How far back the points and the slowest requests go."""
MAX_VIEWERS = 100
_RATE_S = 5
"""Rates and handoffs are of this many seconds."""
_MOST_PAIRED = 32
_NUM_SLOWEST, _NUM_RECENT, _NUM_EVENTS = 10, 200, 20
_REASONS = {
    State.WARMING: "tries its handoffs",
    State.NEW: "has not answered a probe",
    State.LOST: "does not respond",
    State.STUCK: "sends heartbeats, but makes no progress",
}


class WorkerView(msgspec.Struct, kw_only=True):
    """A worker. `state`: ready, warming, new, silent (no statistics in time), lost, stuck, distrusted or
    refused. The figures are None without statistics, `places` if they are unknown."""

    worker_id: str
    name: str
    role: Role
    state: str
    reason: str
    host: str
    pid: int
    age_s: float
    engine: str
    places: int | None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_used_blocks: int | None = None
    kv_blocks: int | None = None


class PairView(msgspec.Struct, kw_only=True):
    """A prefill and a decode worker, by id. `state`: ready, away (one is not ready), cut, cold or refused.
    `num_handoffs`: in the last five seconds."""

    prefill: str
    decode: str
    state: str
    num_handoffs: int


class Point(msgspec.Struct, kw_only=True):
    """Latencies of one second, None without a first token or a later one; without both there is no point."""

    at_s: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


class Slow(msgspec.Struct, kw_only=True):
    """A request that has ended. `request_id` is None for who may not see it; `verdict` is empty if no stage
    is out of line."""

    request_id: str | None
    status: int
    duration_s: float
    stages: Mapping[str, float]
    verdict: str


class Snapshot(msgspec.Struct, kw_only=True):
    """The body of /fleet. `stages`: how many requests are in each stage now."""

    at_s: float
    models: list[str]
    tokens_per_s: float
    requests_per_s: float
    refused_per_s: float
    num_running: int
    num_queued: int
    workers: list[WorkerView]
    pairs: list[PairView]
    stages: dict[str, int]
    points: list[Point]
    events: list[FleetEvent]
    slowest: list[Slow]


class Second(msgspec.Struct, array_like=True):
    """What was counted in one second: latencies by whole milliseconds; `counts` of tokens, ended and refused
    requests."""

    at_s: int
    first_ms: dict[int, int]
    gap_ms: dict[int, int]
    counts: dict[str, int]

    def add(self, other: "Second") -> "Second":
        """The sum of the same second in two processes."""
        both = zip(msgspec.structs.astuple(self)[1:], msgspec.structs.astuple(other)[1:], strict=True)
        return Second(self.at_s, *(Counter(mine) + Counter(theirs) for mine, theirs in both))

    def point(self) -> Point:
        """Its latencies."""
        return Point(
            at_s=self.at_s,
            ttft_p50_s=quantile(self.first_ms, 0.5),
            ttft_p99_s=quantile(self.first_ms, 0.99),
            itl_p50_s=quantile(self.gap_ms, 0.5),
            itl_p99_s=quantile(self.gap_ms, 0.99),
        )


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """In seconds, of counts by whole milliseconds; None if there are none."""
    left = share * sum(counts.values())
    for each_ms in sorted(counts):
        if left <= counts[each_ms]:
            return round((each_ms + left / counts[each_ms]) / 1000, 5)
        left -= counts[each_ms]
    return None


class Part(msgspec.Struct, array_like=True):
    """What one frontend process adds to the snapshot. `handoffs`: (prefill, decode, how many)."""

    num_running: int = 0
    num_queued: int = 0
    stages: dict[str, int] = {}
    handoffs: list[tuple[str, str, int]] = []
    seconds: list[Second] = []
    slowest: list[Slow] = []


OtherParts = Callable[[], Awaitable[Sequence[Part]]]
"""The parts of the frontend's other processes."""


async def no_parts() -> Sequence[Part]:
    """Those of a single process."""
    return ()


class Series:
    """What this process counted in each of the last SPAN_S seconds. Call `tick` once a second."""

    def __init__(self, fleet: "Fleet", metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._gaps: dict[tuple[str, str], list[int]] = {}
        self._totals: Counter[str] = Counter()
        self.seconds: deque[Second] = deque(maxlen=SPAN_S)
        self._handoffs: deque[Counter[tuple[str, str]]] = deque(maxlen=_RATE_S)

    def tick(self) -> None:
        """Keep what was counted since the last call."""
        metrics, fleet, before = self._metrics, self._fleet, self._totals
        self._totals = Counter(
            tokens=fleet.calls.num_tokens(),
            ended=int(metrics.total("requests")),
            refused=int(metrics.total("refused_requests")),
        )
        new = self._totals - before
        self.seconds.append(Second(int(time.time()), metrics.first_ms, self._new_gaps(), new))
        self._handoffs.append(fleet.handoffs)
        metrics.first_ms, fleet.handoffs = Counter(), Counter()

    def _new_gaps(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for labels, counts in self._metrics.gap_counts.items():
            seen = self._gaps.get(labels) or [0] * len(counts)
            if counts != seen:
                both = enumerate(zip(counts, seen, strict=True))
                found.update({gap_ms: new - old for gap_ms, (new, old) in both if new != old})
                self._gaps[labels] = counts.copy()
        return found

    def part(self) -> Part:
        """This process's part of the snapshot."""
        running = self._metrics.records.running()
        handoffs = sum(self._handoffs, Counter())
        return Part(
            num_running=len(running),
            num_queued=int(self._metrics.total("queued_requests")),
            stages=Counter(filter(None, map(_stage, running))),
            handoffs=[(*pair, count) for pair, count in handoffs.items()],
            seconds=list(self.seconds),
            slowest=self._slowest(),
        )

    def _slowest(self) -> list[Slow]:
        records, since_s = self._metrics.records, time.time() - SPAN_S
        newest = list(records.newest(_NUM_RECENT))
        found = {(each.request_id, each.at_s): each for each in (*newest, *records.slowest(_NUM_RECENT))}
        timed = [(each.duration_s or 0.0, each) for each in found.values()]
        timed = [(lasted_s, each) for lasted_s, each in timed if each.at_s + lasted_s > since_s]
        timed.sort(key=lambda pair: -pair[0])
        usual = Usual.of(newest)
        return [_slow(record, lasted_s, usual) for lasted_s, record in timed[:_NUM_SLOWEST]]


def _stage(record: Record) -> str | None:
    """The stage that a running request is in."""
    return next((leg.stage for leg in record.legs if leg.stage is not None), record.stage)


def _slow(record: Record, duration_s: float, usual: Usual) -> Slow:
    why = verdict(record, usual)
    return Slow(
        request_id=record.request_id,
        status=record.status,
        duration_s=duration_s,
        stages={name: round(lasted_s, 6) for name, lasted_s in record.spent().items()},
        verdict="" if why is None else why.cause,
    )


_Answers = Mapping[str, WorkerStats | BaseException]
"""Of workers, by address."""


class Snapshots:
    """Makes snapshots for viewers. `running` must run throughout."""

    def __init__(self, fleet: "Fleet", metrics: Metrics, others: OtherParts = no_parts) -> None:
        self._fleet = fleet
        self._others = others
        self._series = Series(fleet, metrics)
        self.part = self._series.part
        self._making = asyncio.Lock()
        self._made_s = 0.0
        self._encoded: dict[bool, bytes] = {}
        self._num_viewers = 0
        self._closed = asyncio.Event()

    def lately(self, seconds: int) -> Counter[str]:
        """The tokens, and the ended and refused requests, of this process in the last seconds."""
        newest = islice(reversed(self._series.seconds), seconds)
        return sum((Counter(each.counts) for each in newest), Counter())

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Count throughout the context, so that the first viewer sees five minutes."""
        pulse = Pulse(EVERY_S, self._series.tick)
        try:
            yield
        finally:
            pulse.stop()

    def close(self) -> None:
        """End all streams."""
        self._closed.set()

    async def latest(self, *, with_ids: bool) -> bytes:
        """The snapshot as JSON, EVERY_S old at most."""
        async with self._making:
            now_s = _now_s()
            if not self._encoded or now_s - self._made_s > 0.9 * EVERY_S:
                made = await self._make()
                self._made_s = now_s
                hidden = [msgspec.structs.replace(slow, request_id=None) for slow in made.slowest]
                without = msgspec.structs.replace(made, slowest=hidden)
                self._encoded = {True: msgspec.json.encode(made), False: msgspec.json.encode(without)}
            return self._encoded[with_ids]

    def stream(self, *, with_ids: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one a second. Raises NotReady at once if there are too many viewers."""
        if self._num_viewers >= MAX_VIEWERS:
            raise NotReady(f"{MAX_VIEWERS} viewers are watching already; retry later.", retry_after_s=5)
        return self._stream(with_ids)

    async def _stream(self, with_ids: bool) -> AsyncGenerator[bytes, None]:
        self._num_viewers += 1
        try:
            while not self._closed.is_set():
                yield b"data: " + await self.latest(with_ids=with_ids) + b"\n\n"
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), EVERY_S)
        finally:
            self._num_viewers -= 1

    async def _make(self) -> Snapshot:
        asked, others = await asyncio.gather(self._fleet.ask_all(), self._others())
        stats = {worker.address: each for worker, each in asked}
        parts = [self.part(), *others]
        merged: dict[int, Second] = {}
        for second in chain.from_iterable(part.seconds for part in parts):
            known = merged.get(second.at_s)
            merged[second.at_s] = second if known is None else known.add(second)
        seconds = [merged[at_s] for at_s in sorted(merged)]
        lately = (second.counts for second in seconds if second.at_s > time.time() - _RATE_S)
        counts = sum(map(Counter, lately), Counter[str]())
        slowest = sorted(
            chain.from_iterable(part.slowest for part in parts), key=lambda slow: -slow.duration_s
        )
        return Snapshot(
            at_s=time.time(),
            models=self._fleet.models(),
            tokens_per_s=counts["tokens"] / _RATE_S,
            requests_per_s=counts["ended"] / _RATE_S,
            refused_per_s=counts["refused"] / _RATE_S,
            num_running=sum(part.num_running for part in parts),
            num_queued=sum(part.num_queued for part in parts),
            workers=self._workers(stats),
            pairs=list(self._pairs(parts)),
            stages=dict(sum((Counter(part.stages) for part in parts), Counter())),
            points=[second.point() for second in seconds if second.first_ms or second.gap_ms],
            events=self._fleet.events.newest(_NUM_EVENTS),
            slowest=slowest[:_NUM_SLOWEST],
        )

    def _workers(self, stats: _Answers) -> list[WorkerView]:
        views = []
        for worker, state, reason, joined_s in self._fleet.table.described():
            view = _view(worker, state, reason, time.monotonic() - joined_s)
            found = stats.get(worker.address)
            if isinstance(found, WorkerStats):
                view.num_running, view.num_waiting = found.num_running, found.num_waiting
                view.kv_used_blocks, view.kv_blocks = found.kv_used_blocks, found.kv_blocks
            elif state is State.LIVE and isinstance(found, WorkerLost):
                view.state, view.reason = State.LOST.value, _REASONS[State.LOST]
            elif state is State.LIVE and found is not None:
                view.state, view.reason = "silent", "sends no statistics in time"
            views.append(view)
        return sorted(views, key=lambda view: (view.role.value, view.name, view.worker_id))

    def _pairs(self, parts: Sequence[Part]) -> Iterator[PairView]:
        """Those of the first workers of each role."""
        counts = Counter[tuple[str, str]]()
        for prefill, decode, count in chain.from_iterable(part.handoffs for part in parts):
            counts[prefill, decode] += count
        entries, live = self._fleet.table.all(), set(map(id, self._fleet.table.live()))
        prefills = [worker for worker in entries if worker.role is Role.PREFILL][:_MOST_PAIRED]
        decodes = [worker for worker in entries if worker.role is Role.DECODE][:_MOST_PAIRED]
        for p, d in ((p, d) for p in prefills for d in decodes if p.model == d.model):
            state = "ready" if {id(p), id(d)} <= live else "away"
            if why_not_paired(p, d) is not None:
                state = "refused"
            elif self._fleet.cut.has(p, d):
                state = "cut"
            elif p.worker_id in d.cold_peers or d.worker_id in p.cold_peers:
                state = "cold"
            count = counts[p.worker_id, d.worker_id]
            yield PairView(prefill=p.worker_id, decode=d.worker_id, state=state, num_handoffs=count)


def _view(worker: WorkerInfo, state: State, reason: str, age_s: float) -> WorkerView:
    return WorkerView(
        worker_id=worker.worker_id,
        name=worker.label,
        role=worker.role,
        state="ready" if state is State.LIVE else state.value,
        reason=reason or _REASONS.get(state, ""),
        host=worker.host,
        pid=worker.pid,
        age_s=round(age_s, 1),
        engine=f"{worker.engine} {worker.engine_version}",
        places=worker.max_batch_size,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
