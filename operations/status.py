"""`python -m baton status`: the workers, their load, and what happened lately, as the frontend sees it."""

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator

from baton.flags import flag, parse
from baton.messages import Role
from frontend.routing.health import Health
from frontend.snapshot import Slow, Snapshot, WorkerView
from operations.client import Client, FrontendError, FrontendFlags
from operations.terminal import Line, printable, show

_BAD, _HEAD = "red", "bold"
_NUM_EVENTS, _NUM_SLOWEST = 10, 5
_COLUMNS = "{:<{}} {:<7} {:<8} {:>8} {:>7}  {:<10} {:>4}  {}".format


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSettings(FrontendFlags):
    """Flags of `python -m baton status`."""

    brief: bool = flag(False, "one line: the number of workers per role")


def status(argv: list[str]) -> int:
    """Print what the frontend sees. Exit status: 0 healthy, 1 unhealthy, 2 no frontend."""
    about = "Workers, load, the last events and the slowest requests."
    parsed = parse(StatusSettings, argv, prog="python -m baton status", description=about)
    try:
        client = Client(parsed)
        health = client.get("/health", Health)
        is_brief = parsed.settings.brief
        parts = [[Line(_counts(health))]] if is_brief else sections(health, fleet_of(client))
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    show(line for part in parts for line in part)
    return 0 if health.status == "healthy" else 1


def fleet_of(client: Client) -> Snapshot | None:
    """The snapshot; None if this frontend is too old to have one."""
    try:
        return client.get("/fleet", Snapshot)
    except FrontendError as error:
        if error.status != 404:
            raise
        return None


def sections(health: Health, fleet: Snapshot | None) -> list[list[Line]]:
    """The whole screen: what is served, problems, workers, the slowest requests, events."""
    heading = [Line(f"{health.status}: {_counts(health)}", _HEAD if health.status == "healthy" else _BAD)]
    problems = [Line(printable(text), _BAD) for text in _problems(health, has_rows=fleet is not None)]
    if fleet is None:
        return [heading, problems]
    heading += map(Line, _load(fleet))
    engines = {i.worker_id: f"{i.model}  {i.engine}  {i.kv_transfer}" for i in health.instances}
    width = max((len(worker.name) for worker in fleet.workers), default=6)
    titles = ("ROLE", "STATE", "RUNNING", "WAITING", "KV", "AGE", "HOST:PID")
    workers = [Line(_COLUMNS("WORKER", width, *titles), _HEAD)]
    workers += (_worker(worker, width, engines.get(worker.worker_id, "")) for worker in fleet.workers)
    slowest = [Line(_slow(slow), _BAD if slow.status >= 400 else "") for slow in fleet.slowest[:_NUM_SLOWEST]]
    events = [Line(printable(text)) for text in _events(fleet)]
    if slowest:
        slowest.insert(0, Line("SLOWEST of the last five minutes", _HEAD))
    if events:
        events.insert(0, Line("EVENTS", _HEAD))
    return [heading, problems, workers, slowest, events]


def _counts(health: Health) -> str:
    roles = Counter(instance.role for instance in health.instances)
    counts = [f"{roles[Role.PREFILL]} prefill", f"{roles[Role.DECODE]} decode"]
    others = {"warming": health.warming, "lost": health.lost, "stuck": health.stuck}
    return ", ".join([*counts, *(f"{len(ids)} {what}" for what, ids in others.items() if ids)])


def _problems(health: Health, *, has_rows: bool) -> Iterator[str]:
    """`has_rows`: each worker has a row of its own."""
    yield from (f"missing {name}" for name in health.missing)
    if not has_rows:
        for i in health.instances:
            yield f"{i.worker_id}  {i.role.value}  {i.model}  {i.engine}  {i.kv_transfer}"
        for state, ids in (("warming", health.warming), ("lost", health.lost), ("stuck", health.stuck)):
            yield from (f"{worker_id}  {state}" for worker_id in ids)
    yield from (f"refused worker {reason}" for reason in health.refused)
    yield from (f"cold pair {pair}" for pair in health.cold_pairs)
    yield from (f"cut pair {pair}" for pair in health.cut_pairs)
    yield from (f"refused pair {reason}" for reason in health.refused_pairs)


def _load(fleet: Snapshot) -> Iterator[str]:
    refused = f", {fleet.refused_per_s:,.1f} refused/s" if fleet.refused_per_s else ""
    rates = f"{fleet.tokens_per_s:,.0f} tokens/s, {fleet.requests_per_s:,.1f} requests/s"
    yield f"{fleet.num_running} running, {fleet.num_queued} queued, {rates}{refused}"
    for p in fleet.points[-1:]:
        pairs = (("TTFT", p.ttft_p50_s, p.ttft_p99_s), ("ITL", p.itl_p50_s, p.itl_p99_s))
        yield ", ".join(
            f"{name} p50 {1000 * p50_s:.0f} ms p99 {1000 * p99_s:.0f} ms"
            for name, p50_s, p99_s in pairs
            if p50_s is not None and p99_s is not None
        )


def _worker(w: WorkerView, width: int, engine: str) -> Line:
    running = "-" if w.num_running is None else f"{w.num_running}" + (f"/{w.places}" if w.places else "")
    kv = "-"
    if w.kv_blocks and w.kv_used_blocks is not None:
        share = w.kv_used_blocks / w.kv_blocks
        kv = f"{'#' * round(5 * share):.<5} {share:>4.0%}"
    waiting, place = "-" if w.num_waiting is None else w.num_waiting, f"{w.host}:{w.pid}" if w.host else ""
    row = _COLUMNS(w.name, width, w.role.value, w.state, running, waiting, kv, age(w.age_s), place)
    text = f"{row}  {w.reason or engine}".rstrip()
    return Line(printable(text), {"ready": "", "new": "yellow", "warming": "yellow"}.get(w.state, _BAD))


def age(seconds: float) -> str:
    """A duration in its largest unit."""
    units = ((86400, "d"), (3600, "h"), (60, "m"), (0, "s"))
    size, unit = next((size, unit) for size, unit in units if seconds >= size)
    return f"{seconds // (size or 1):.0f}{unit}"


def _slow(slow: Slow) -> str:
    longest = sorted(slow.stages.items(), key=lambda pair: -pair[1])[:3]
    stages = ", ".join(f"{name.replace('_', ' ')} {lasted_s:.2f}" for name, lasted_s in longest)
    return printable(
        f"{slow.duration_s:>8.2f} s  {slow.status}  {slow.request_id or '-'}  {slow.verdict or stages}"
    )


def _events(fleet: Snapshot) -> Iterator[str]:
    for event in fleet.events[:_NUM_EVENTS]:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at_s))
        lasted = "" if event.lasted_s is None else f" after {event.lasted_s:.1f} s"
        yield f"{at}  {event.what} {event.kind}{lasted}" + (f": {event.detail}" if event.detail else "")
