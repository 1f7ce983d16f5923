"""What the fleet does, and did in the last five minutes: made at most once a second for all who look."""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import msgspec

from baton.errors import NotReady
from baton.messages import Role, WorkerStats
from baton.pace import Pulse
from baton.pairing import why_not_paired
from frontend.metrics import Metrics, Others
from frontend.record import Records, Stage
from frontend.routing.health import FleetEvent
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
}
K = TypeVar("K", bound=Hashable)


class WorkerView(msgspec.Struct, kw_only=True):
    """A worker. `state`: ready, warming, new, silent (no statistics in time), lost, stuck, distrusted or
    refused. The figures are None without statistics, `places` if they are unknown, `tokens_per_step` without
    guesses."""

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
    tokens_per_step: float | None = None


class PairView(msgspec.Struct, kw_only=True):
    """A prefill and a decode worker, by id. `state`: ready, away (one is not ready), cut, cold or refused.
    `num_handoffs`: in the last five seconds."""

    prefill: str
    decode: str
    state: str
    num_handoffs: int


class Point(msgspec.Struct, array_like=True):
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
    """The body of /fleet. `stages`: how many choices are in each stage now."""

    at_s: float
    models: list[str]
    tokens_per_s: float
    requests_per_s: float
    refused_per_s: float
    num_running: int
    num_queued: int
    workers: list[WorkerView]
    pairs: list[PairView]
    stages: Mapping[Stage, int]
    points: list[Point]
    events: list[FleetEvent]
    slowest: list[Slow]


class Second(msgspec.Struct, array_like=True):
    """What one process counted in one second: latencies by milliseconds, of which two digits count; `counts`
    of tokens, ended and refused requests."""

    at_s: int
    first_ms: Mapping[int, int]
    gap_ms: Mapping[int, int]
    counts: Mapping[str, int]


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """In seconds, of counts by milliseconds; None if there are none."""
    left = share * sum(counts.values())
    for each_ms in sorted(counts):
        left -= counts[each_ms]
        if left <= 0:
            return each_ms / 1000
    return None


def _total(counts: Iterable[Mapping[K, int]]) -> Counter[K]:
    found = Counter[K]()
    for each in counts:
        found.update(each)
    return found


class Part(msgspec.Struct, array_like=True):
    """What one frontend process adds to the snapshot. `handoffs`: by (prefill, decode)."""

    num_running: int = 0
    num_queued: int = 0
    stages: Mapping[Stage, int] = {}
    handoffs: Mapping[tuple[str, str], int] = {}
    seconds: Sequence[Second] = ()
    slowest: Sequence[Slow] = ()


class Look(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Asks another process for its Part, with the seconds from this Unix time on."""

    since_s: int


def _coarse(counts: Mapping[int, int]) -> Counter[int]:
    """By two digits, so that a second needs little memory however many requests are in it."""
    found = Counter[int]()
    for each_ms, count in counts.items():
        found[int(float(f"{each_ms:.2g}"))] += count
    return found


def _slowest(records: Records) -> list[Slow]:
    newest = records.newest(_NUM_RECENT)
    found = {(each.request_id, each.at_s): each for each in (*newest, *records.slowest(_NUM_SLOWEST, SPAN_S))}
    since_s = time.time() - SPAN_S
    recent = (each for each in found.values() if each.at_s + (each.duration_s or 0.0) > since_s)
    usual = Usual(newest)
    return [
        Slow(
            request_id=each.request_id,
            status=each.status,
            duration_s=each.duration_s or 0.0,
            stages={stage: round(lasted_s, 6) for stage, lasted_s in each.spent().items()},
            verdict=why.cause if (why := verdict(each, usual)) else "",
        )
        for each in nlargest(_NUM_SLOWEST, recent, attrgetter("duration_s"))
    ]


class Snapshots:
    """Makes snapshots for viewers, of what this process counted in each of the last SPAN_S seconds."""

    def __init__(self, fleet: "Fleet", metrics: Metrics, others: Others) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._others = others
        self._totals: Counter[str] = Counter()
        self._seconds: deque[Second] = deque(maxlen=SPAN_S)
        self._handoffs: deque[Counter[tuple[str, str]]] = deque(maxlen=_RATE_S)
        self._points: dict[int, Point] = {}
        self._since_s = 0
        self._making: asyncio.Task[tuple[bytes, bytes]] | None = None
        self._begun_s = 0.0
        self._viewers = WeakSet[AsyncGenerator[bytes, None]]()
        self._closed = asyncio.Event()

    def start(self) -> None:
        """Count from now on, so that the first viewer sees five minutes."""
        self._pulse = Pulse(EVERY_S, self.tick)

    def close(self) -> None:
        """End all streams, and count no more."""
        self._pulse.stop()
        self._closed.set()

    def tick(self) -> None:
        """Keep what was counted since the last call."""
        metrics, fleet, before = self._metrics, self._fleet, self._totals
        self._totals = Counter(
            tokens=fleet.calls.num_tokens(),
            ended=int(metrics.total("requests")),
            refused=int(metrics.total("refused_requests")),
        )
        metrics.note_gaps()
        first_ms, gap_ms = _coarse(metrics.first_ms), _coarse(metrics.gap_ms)
        self._seconds.append(Second(int(time.time()), first_ms, gap_ms, self._totals - before))
        self._handoffs.append(fleet.handoffs)
        metrics.first_ms, metrics.gap_ms, fleet.handoffs = Counter(), Counter(), Counter()

    def lately(self, seconds: int) -> Counter[str]:
        """The tokens, and the ended and refused requests, of the last seconds."""
        return _total(each.counts for each in islice(reversed(self._seconds), seconds))

    def part(self, since_s: int) -> Part:
        """This process's part of the snapshot, with the seconds from this Unix time on."""
        metrics, running = self._metrics, self._metrics.records.running()
        return Part(
            num_running=sum(set(record.running) != {"queue"} for record in running),
            num_queued=int(metrics.total("queued_requests")),
            stages=Counter(chain.from_iterable(record.running for record in running)),
            handoffs=_total(self._handoffs),
            seconds=[each for each in self._seconds if each.at_s >= since_s],
            slowest=_slowest(metrics.records),
        )

    async def latest(self, *, with_ids: bool) -> bytes:
        """The snapshot as JSON, EVERY_S old at most."""
        now_s = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now_s - self._begun_s > 0.9 * EVERY_S):
            self._making, self._begun_s = asyncio.create_task(self._encoded()), now_s
        return (await asyncio.shield(self._making))[with_ids]

    def stream(self, *, with_ids: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one a second. Raises NotReady at once if there are too many viewers."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise NotReady(f"{MAX_VIEWERS} viewers are watching already; retry later.", retry_after_s=5)
        self._viewers.add(viewer := self._stream(with_ids))
        return viewer

    async def _stream(self, with_ids: bool) -> AsyncGenerator[bytes, None]:
        while not self._closed.is_set():
            yield b"data: " + await self.latest(with_ids=with_ids) + b"\n\n"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), EVERY_S)

    async def _encoded(self) -> tuple[bytes, bytes]:
        """Without ids, and with them."""
        made = await self._make()
        with_ids = msgspec.json.encode(made)
        for slow in made.slowest:
            slow.request_id = None
        return msgspec.json.encode(made), with_ids

    async def _make(self) -> Snapshot:
        asked, others = await asyncio.gather(self._fleet.ask_all(), self._others(Look(self._since_s)))
        parts = [self.part(self._since_s), *others]
        now_s = time.time()
        self._since_s = int(now_s) - _RATE_S  # earlier seconds are over in all processes
        slowest = chain.from_iterable(part.slowest for part in parts)
        lately = self._note_seconds(list(chain.from_iterable(part.seconds for part in parts)), int(now_s))
        return Snapshot(
            at_s=now_s,
            models=self._fleet.models(),
            tokens_per_s=lately["tokens"] / _RATE_S,
            requests_per_s=lately["ended"] / _RATE_S,
            refused_per_s=lately["refused"] / _RATE_S,
            num_running=sum(part.num_running for part in parts),
            num_queued=sum(part.num_queued for part in parts),
            workers=self._workers({worker.address: found for worker, found in asked}),
            pairs=list(self._pairs(_total(part.handoffs for part in parts))),
            stages=_total(part.stages for part in parts),
            points=list(self._points.values()),
            events=self._fleet.events.newest(_NUM_EVENTS),
            slowest=nlargest(_NUM_SLOWEST, slowest, attrgetter("duration_s")),
        )

    def _note_seconds(self, seconds: Sequence[Second], now_s: int) -> Counter[str]:
        """Keep their points. Returns the counts of the last whole seconds: not all have counted this one."""
        found = defaultdict[int, list[Second]](list)
        for each in seconds:
            if each.first_ms or each.gap_ms:
                found[each.at_s].append(each)
        for at_s, same in found.items():
            latencies = (_total(each.first_ms for each in same), _total(each.gap_ms for each in same))
            values_s = (quantile(counts, share) for counts in latencies for share in (0.5, 0.99))
            self._points[at_s] = Point(at_s, *values_s)
        self._points = {at_s: self._points[at_s] for at_s in sorted(self._points) if at_s > now_s - SPAN_S}
        return _total(each.counts for each in seconds if now_s - _RATE_S <= each.at_s < now_s)

    def _workers(self, stats: Mapping[str, WorkerStats | BaseException]) -> list[WorkerView]:
        views = []
        for entry in self._fleet.table.shown():
            worker, state = entry.worker, entry.state
            found = stats.get(worker.address)
            name, reason = state.value, entry.reason or _REASONS.get(state, "")
            if state is State.LIVE:
                name = "silent" if isinstance(found, BaseException) else "ready"
                why = getattr(found, "message", "sends no statistics in time")
                reason = "" if name == "ready" else why.rpartition(" was lost: ")[2]
            known: dict[str, Any] = {
                each: getattr(worker, each, getattr(found, each, None))
                for each in WorkerView.__struct_fields__
            }
            known |= {"name": worker.label, "state": name, "reason": reason, "places": worker.max_batch_size}
            known["engine"] = f"{worker.engine} {worker.engine_version}"
            known["age_s"] = round(time.monotonic() - entry.joined_s, 1)
            views.append(WorkerView(**known))
        return sorted(views, key=attrgetter("role.value", "name", "worker_id"))

    def _pairs(self, handoffs: Mapping[tuple[str, str], int]) -> Iterator[PairView]:
        """Those of the first workers of each role."""
        registered, live = self._fleet.table.all(), {each.address for each in self._fleet.table.live()}
        prefills, decodes = ([w for w in registered if w.role is role][:_MOST_PAIRED] for role in Role)
        for p, d in ((p, d) for p in prefills for d in decodes if p.model == d.model):
            state = "ready" if {p.address, d.address} <= live else "away"
            if why_not_paired(p, d) is not None:
                state = "refused"
            elif self._fleet.cut.has(p, d):
                state = "cut"
            elif p.worker_id in d.cold_peers or d.worker_id in p.cold_peers:
                state = "cold"
            num_handoffs = handoffs.get((p.worker_id, d.worker_id), 0)
            yield PairView(prefill=p.worker_id, decode=d.worker_id, state=state, num_handoffs=num_handoffs)
