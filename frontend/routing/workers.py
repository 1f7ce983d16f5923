"""Which workers get requests: a table of their states, probes of workers and pairs, the watchdog of calls."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sized
from contextlib import suppress
from enum import Enum
from typing import Literal

from msgspec.structs import replace

from baton.loop_delay import LoopDelay
from baton.messages import Reply, WorkerInfo
from baton.pairing import works
from baton.telemetry import Line
from baton.transport import Transport
from frontend.routing.health import Events, Kind

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5
_SHOWN_S, _MOST_SHOWN = 300.0, 32
_STOOD_S = 0.4
"""A worker that has left the registry answers for little longer."""


class State(Enum):
    """What a registered worker is to this frontend. Only live ones get requests."""

    WARMING = "warming"
    """It tries its handoffs and has not announced that it is ready."""
    NEW = "new"
    """It is ready and has not answered a probe: its address may be anything."""
    LIVE = "live"
    LOST = "lost"
    """It does not respond. Its lease may take long to expire, and a frozen process keeps it."""
    STUCK = "stuck"
    """It responds, but its engine makes no progress."""
    DISTRUSTED = "distrusted"
    """Its certificate is of another authority than this process's. It is probed, as certificates change."""
    REFUSED = "refused"
    """It sent what no genuine worker sends, or cannot be served; final."""


Event = Literal["warms", "ready", "answered", "silent", "untrusted", "lost", "stalled", "invalid"]
"""What happens to a registered worker. It registers as not ready (`warms`) or ready; a probe succeeds
(`answered`), or fails (`silent`), because of a certificate (`untrusted`); a request loses it; its heartbeats
arrive, but none of its requests progresses (`stalled`); it sends tokens that the model does not have,
computes other numbers, or registers with a refusal (`invalid`)."""

_TABLE = """
             warms    ready       answered  silent  untrusted   lost        stalled  invalid
warming      warming  new         -         -       -           warming     warming  refused
new          warming  new         live      lost    distrusted  new         stuck    refused
live         warming  live        -         -       -           lost        stuck    refused
lost         warming  lost        live      lost    distrusted  lost        stuck    refused
stuck        warming  stuck       live      stuck   -           stuck       stuck    refused
distrusted   warming  distrusted  live      lost    distrusted  distrusted  stuck    refused
refused      refused  refused     -         -       -           refused     refused  refused
"""
_EVENTS, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())
TRANSITIONS = {
    (State(state), event): State(cell)
    for state, *cells in _ROWS
    for event, cell in zip(_EVENTS, cells, strict=True)
    if cell != "-"
}
"""The next state by state and event. A pair without an entry cannot happen, and raises KeyError."""
_AWAY = frozenset({State.LOST, State.STUCK, State.DISTRUSTED})
_PROBED = _AWAY | {State.NEW}
_KINDS: dict[State, Kind] = {
    State.NEW: "joined",
    State.LOST: "lost",
    State.STUCK: "lost",
    State.DISTRUSTED: "refused",
    State.REFUSED: "refused",
}
"""The event of the fleet when a worker comes to this state; from one of `_AWAY` to LIVE it is `recovered`."""

Probe = Callable[[WorkerInfo, State], Awaitable[tuple[Event, str]]]
"""Probes a worker in that state: `answered`, `silent` or `untrusted`, and the reason."""


class Entry:
    """A worker in the table. `joined_s` is a `monotonic` value."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.state = State.WARMING
        self.reason = ""
        self.joined_s = time.monotonic()
        self.away_since_s = 0.0
        self.probe: asyncio.Task[None] | None = None


class Workers:
    """Registered workers by address, which is new with each start of a process."""

    def __init__(self, probe: Probe, events: Events, delays: LoopDelay) -> None:
        self._probe = probe
        self._delays = delays
        self._events = events
        self._leaving: set[asyncio.Task[None]] = set()
        self._ended: deque[Entry] = deque(maxlen=_MOST_SHOWN)
        self._entries: dict[str, Entry] = {}
        self.change = asyncio.Event()
        """Set at the next change, also of a pair; then there is another one."""

    def update(self, registered: Iterable[WorkerInfo]) -> None:
        """Replace the registered workers; a new one is probed once it is ready. Of several with one name the
        first that was seen keeps it."""
        workers = {worker.address: worker for worker in registered}
        for address in self._entries.keys() - workers.keys():
            entry = self._entries.pop(address)
            _stop(entry)
            if entry.state is not State.WARMING:
                task = asyncio.create_task(self._note_leaving(entry))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
        entries = {address: self._entries.get(address) or Entry(w) for address, w in workers.items()}
        holders = {worker.worker_id: address for address, worker in workers.items()}
        holders |= {entry.worker.name: address for address, entry in self._entries.items()}
        self._entries = entries
        for address, entry in entries.items():
            is_held = holders.setdefault(workers[address].name, address) != address
            entry.worker = replace(workers[address], name="") if is_held else workers[address]
            self.note(entry.worker, "ready" if entry.worker.is_ready else "warms")
            if entry.worker.refusal:
                self.note(entry.worker, "invalid", entry.worker.refusal)
        self.note_change()

    def note(self, worker: WorkerInfo, event: Event, reason: str = "") -> None:
        """Record an event of a worker; nothing if it is no longer registered."""
        entry = self._entries.get(worker.address)
        if entry is None:
            return
        before, entry.state = entry.state, TRANSITIONS[entry.state, event]
        is_new_reason = entry.state is State.DISTRUSTED and reason not in {"", entry.reason}
        if entry.state is before and not is_new_reason:
            return
        entry.reason = reason.rpartition(" was lost: ")[2]  # the worker is named beside it
        state, now_s = entry.state, _now_s()
        if state in _AWAY and before not in _AWAY:
            entry.away_since_s = now_s
        if state in _KINDS:
            again = any(each.worker.address == worker.address for each in self._ended)
            facts = f"{worker.role.value}, kv={worker.kv_transfer}" + ", the same process as before" * again
            detail = facts if state is State.NEW else entry.reason
            self._events.add(_KINDS[state], entry.worker.label, detail)
        elif state is State.LIVE and before in _AWAY:
            self._events.add("recovered", entry.worker.label, lasted_s=now_s - entry.away_since_s)
        if state not in _PROBED:
            _stop(entry)
        elif entry.probe is None:
            entry.probe = asyncio.create_task(self._probe_until_live(entry))
        self.note_change()

    def all(self) -> list[WorkerInfo]:
        return [entry.worker for entry in self._entries.values()]

    def shown(self) -> list[Entry]:
        """The registered ones; for a while also the last of each other name that ended without leaving."""
        names, since_s = {entry.worker.label for entry in self._entries.values()}, _now_s() - _SHOWN_S
        recent = {entry.worker.label: entry for entry in self._ended if entry.away_since_s > since_s}
        return [*self._entries.values(), *(entry for name, entry in recent.items() if name not in names)]

    def has(self, worker: WorkerInfo) -> bool:
        """Whether a worker is registered, perhaps with other facts than before."""
        return worker.address in self._entries

    def live(self) -> list[WorkerInfo]:
        return self.of(State.LIVE)

    def of(self, state: State) -> list[WorkerInfo]:
        return [entry.worker for entry in self._entries.values() if entry.state is state]

    def reasons(self, *states: State) -> list[str]:
        """`WORKER_ID: REASON` of the workers in these states."""
        found = [entry for entry in self._entries.values() if entry.state in states]
        return [f"{entry.worker.worker_id}: {entry.reason}" for entry in found]

    def note_change(self) -> None:
        self.change.set()
        self.change = asyncio.Event()

    async def probed(self, limit_s: float) -> None:
        """Wait until no worker is new, `limit_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.of(State.NEW):
                    await self.change.wait()

    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self._leaving, *(each.probe for each in self._entries.values() if each.probe is not None)]

    async def _note_leaving(self, entry: Entry) -> None:
        """Of a lost one nothing is new. One that leaves in order still answers for a moment, too briefly for
        a frontend that stood still."""
        name, since_s = entry.worker.label, time.perf_counter() - _STOOD_S
        is_silent = entry.state is State.LIVE and (await self._probe(entry.worker, State.LOST))[0] == "silent"
        if is_silent and self._delays.longest(since_s).lasted_s < _STOOD_S:
            entry.state, entry.away_since_s = State.LOST, _now_s()
            entry.reason = "it ended without leaving the registry first"
            self._events.add("lost", name, entry.reason)
        elif entry.state is not State.LOST:
            self._events.add("left", name, "or lost: this frontend stood still" if is_silent else "")
            return
        self._ended.append(entry)

    async def _probe_until_live(self, entry: Entry) -> None:
        while True:
            state = entry.state
            event, reason = await self._probe(entry.worker, state)
            if entry.state is state:  # else the probe was for another state
                self.note(entry.worker, event, reason)  # cancels this task once it is live
            await asyncio.sleep(PROBE_EVERY_S)  # between two probes


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _stop(entry: Entry) -> None:
    if entry.probe is not None:
        entry.probe.cancel()
        entry.probe = None


FIRST_WAIT_S = 10.0
MAX_WAIT_S = 60.0
_TRIAL_S = 5.0


class CutPairs:
    """The excluded pairs: by their incarnations, the tasks that try them, which have their names."""

    def __init__(self, transport: Transport, table: Workers, events: Events) -> None:
        self._transport = transport
        self._events = events
        self._table = table
        self.trials: dict[tuple[str, str], asyncio.Task[None]] = {}

    def add(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        """Avoid this pair until a trial succeeds: after FIRST_WAIT_S, then after twice as long each time."""
        if not self.has(prefill, decode):
            name = f"{prefill.label} -> {decode.label}"
            self._events.add("cut", name, "no KV arrived")
            task = asyncio.create_task(self._try(prefill, decode, name), name=name)
            self.trials[prefill.incarnation, decode.incarnation] = task
            self._table.note_change()

    def has(self, prefill: WorkerInfo, decode: WorkerInfo) -> bool:
        return (prefill.incarnation, decode.incarnation) in self.trials

    def names(self) -> list[str]:
        return sorted(task.get_name() for task in self.trials.values())

    async def _try(self, prefill: WorkerInfo, decode: WorkerInfo, name: str) -> None:
        wait_s, began_s = FIRST_WAIT_S, _now_s()
        while True:
            await asyncio.sleep(wait_s)  # between two trials
            wait_s = min(2 * wait_s, MAX_WAIT_S)
            is_gone = not (self._table.has(prefill) and self._table.has(decode))
            if is_gone or await works(self._transport, prefill, decode, limit_s=_TRIAL_S):
                break
        del self.trials[prefill.incarnation, decode.incarnation]
        self._table.note_change()
        detail = "a worker has left" if is_gone else ""
        self._events.add("restored", name, detail, _now_s() - began_s)


NO_PROGRESS_S = 10.0
_CHECKS = 10


class _Held:
    """The calls that wait for one worker, the oldest first. Counts checks, not seconds: a frontend that stood
    still has not waited for anything."""

    def __init__(self, worker: WorkerInfo) -> None:
        self.worker = worker
        self.waiting: dict[Call, Sized] = {}
        self.num_before = 0  # tokens of calls that are answered, less those that others began with
        self.num_seen = 0  # tokens, at the last check
        self.num_stalled = 0
        self.examining: asyncio.Task[None] | None = None

    def num_tokens(self) -> int:
        """Tokens of all its calls."""
        return self.num_before + sum(map(len, self.waiting.values()))


class Call:
    """A running call. Its worker counts it until it is closed, the watchdog until it is answered; its
    progress is the growth of `tokens`."""

    __slots__ = ("_held", "_num_running", "replies", "since_s")

    def __init__(
        self, replies: AsyncGenerator[Reply, None], tokens: Sized, held: _Held, num_running: Counter[str]
    ) -> None:
        self.replies = replies
        self.since_s = _now_s()
        self._held = held
        self._num_running = num_running
        held.waiting[self] = tokens
        held.num_before -= len(tokens)
        num_running[held.worker.worker_id] += 1

    def answered(self) -> None:
        """Nothing more is expected of the worker: the watchdog leaves this call out."""
        self._held.num_before += len(self._held.waiting.pop(self, ()))

    async def close(self) -> None:
        """Cancel the call if it runs; once."""
        self._num_running[self._held.worker.worker_id] -= 1
        self.answered()
        await self.replies.aclose()


class Calls:
    """The running calls to workers. `on_stuck` gets a worker whose requests make no progress for
    `no_progress_s` and that `is_stuck` then finds stuck. An error is not progress: a hung engine also rejects
    requests as its queue is full."""

    def __init__(
        self,
        is_stuck: Callable[[WorkerInfo], Awaitable[bool]],
        on_stuck: Callable[[WorkerInfo], None],
        no_progress_s: float,
    ) -> None:
        self.num_running: Counter[str] = Counter()
        """By worker id."""
        self._is_stuck = is_stuck
        self._on_stuck = on_stuck
        self._every_s = no_progress_s / _CHECKS
        self._held: dict[str, _Held] = {}
        self._num_before = 0  # tokens of those that are no longer held

    def begin(self, worker: WorkerInfo, replies: AsyncGenerator[Reply, None], tokens: Sized) -> Call:
        held = self._held.get(worker.incarnation)
        if held is None:
            held = self._held[worker.incarnation] = _Held(worker)
        return Call(replies, tokens, held, self.num_running)

    def longest_wait_s(self, worker: WorkerInfo) -> float:
        """How long the oldest of the calls that wait for this worker has waited; 0 if there is none."""
        held = self._held.get(worker.incarnation)
        oldest = next(iter(held.waiting), None) if held else None
        return _now_s() - oldest.since_s if oldest else 0.0

    def num_tokens(self) -> int:
        """All that arrived so far, of any worker."""
        return self._num_before + sum(held.num_tokens() for held in self._held.values())

    async def watch(self) -> None:
        """Check every worker, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._every_s)  # between two checks
                for incarnation, held in tuple(self._held.items()):
                    num_tokens = held.num_tokens()
                    is_stalled = held.waiting and num_tokens == held.num_seen
                    held.num_stalled = held.num_stalled + 1 if is_stalled else 0
                    held.num_seen = num_tokens
                    if held.examining is None and held.num_stalled >= _CHECKS:
                        held.examining = asyncio.create_task(self._examine(held))
                    elif not (held.examining or held.waiting):
                        self._num_before += self._held.pop(incarnation).num_before
        finally:
            for held in self._held.values():
                if held.examining is not None:
                    held.examining.cancel()

    async def _examine(self, held: _Held) -> None:
        is_stuck = await self._is_stuck(held.worker)
        log.warning(Line("worker makes no progress", worker=held.worker.label, is_stuck=is_stuck))
        if is_stuck and held.num_stalled >= _CHECKS:
            self._on_stuck(held.worker)
        held.num_stalled = 0
        held.examining = None
