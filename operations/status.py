"""`python -m baton status`: the workers, their load, and what happened lately, as the frontend sees it."""

import dataclasses
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator

from baton.flags import flag, parse
from baton.messages import Role
from frontend.routing.events import FleetEvent
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
        if parsed.settings.brief:
            health = client.get("/health", Health)
            show([Line(_counts(health))])
        else:
            health, fleet = look(client)
            show(itertools.chain(*sections(health, fleet)))
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0 if health.status == "healthy" else 1


def look(client: Client) -> tuple[Health, Snapshot | None]:
    """What the frontend sees; without a snapshot if it is an old one. Raises FrontendError."""
    health = client.get("/health", Health)
    try:
        return health, client.get("/fleet", Snapshot)
    except FrontendError as error:
        if error.status == 404:
            return health, None
        raise


def sections(health: Health, fleet: Snapshot | None) -> list[list[Line]]:
    """The whole screen: what is served, problems, workers, the slowest requests, events."""
    heading = [Line(f"{health.status}: {_counts(health)}", _HEAD if health.status == "healthy" else _BAD)]
    problems = [Line(printable(text), _BAD) for text in _problems(health)]
    if fleet is None:
        return [heading, problems]
    engines = {i.worker_id: f"{i.model}  {i.engine}  {i.kv_transfer}" for i in health.instances}
    width = min(40, max((len(worker.name) for worker in fleet.workers), default=6))
    titles = ("ROLE", "STATE", "RUNNING", "WAITING", "KV", "AGE", "HOST:PID")
    workers = [Line(_COLUMNS("WORKER", width, *titles), _HEAD)]
    workers += (_worker(worker, width, engines.get(worker.worker_id, "")) for worker in fleet.workers)
    slowest = [Line("SLOWEST of the last five minutes", _HEAD), *map(_slow, fleet.slowest[:_NUM_SLOWEST])]
    events = [Line("EVENTS", _HEAD), *map(_event, fleet.events[:_NUM_EVENTS])]
    lists = [each if len(each) > 1 else [] for each in (slowest, events)]
    return [[*heading, *map(Line, _load(fleet))], problems, workers, *lists]


def _counts(health: Health) -> str:
    roles = Counter(instance.role for instance in health.instances)
    counts = [f"{roles[Role.PREFILL]} prefill", f"{roles[Role.DECODE]} decode"]
    others = {"warming": health.warming, "lost": health.lost, "stuck": health.stuck}
    return ", ".join([*counts, *(f"{len(ids)} {what}" for what, ids in others.items() if ids)])


def _problems(health: Health) -> Iterator[str]:
    for what, found in (
        ("missing", health.missing),
        ("refused worker", health.refused),
        ("cold pair", health.cold_pairs),
        ("cut pair", health.cut_pairs),
        ("refused pair", health.refused_pairs),
    ):
        yield from (f"{what} {each}" for each in found)


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


def _slow(slow: Slow) -> Line:
    longest = sorted(slow.stages.items(), key=lambda pair: -pair[1])[:3]
    stages = ", ".join(f"{name.replace('_', ' ')} {lasted_s:.2f}" for name, lasted_s in longest)
    text = f"{slow.duration_s:>8.2f} s  {slow.status}  {slow.request_id or '-'}  {slow.verdict or stages}"
    return Line(printable(text), _BAD if slow.status >= 400 else "")


def _event(event: FleetEvent) -> Line:
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.at_s))
    lasted = "" if event.lasted_s is None else f" after {event.lasted_s:.1f} s"
    detail = f": {event.detail}" if event.detail else ""
    return Line(printable(f"{at}  {event.what} {event.kind}{lasted}{detail}"))
