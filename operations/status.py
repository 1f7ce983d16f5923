"""`python -m baton status`: workers, load and events, as the frontend sees them. `top`: the same, live."""

import contextlib
import dataclasses
import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import astuple
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.flags import Parsed, flag
from baton.messages import Role
from frontend.routing.health import Health
from frontend.snapshot import Snapshot, WorkerView
from operations.client import Client, FrontendFlags
from operations.errors import FrontendError, printable

_NUM_EVENTS, _NUM_SLOWEST, _LEAST_COLUMNS = 10, 5, 80
_HELP = Text("Ctrl-C: quit   python -m baton why ID: one request", "dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSettings(FrontendFlags):
    """Flags of `python -m baton status`."""

    brief: bool = flag(False, "one line: the number of workers per role")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopSettings(FrontendFlags):
    """Flags of `python -m baton top`."""

    interval: float = flag(1.0, "seconds between looks", metavar="S", at_least=0.1, at_most=3600)
    count: int | None = flag(None, "plain text, N times", metavar="N", at_least=1, at_most=1_000_000)


def status(parsed: Parsed[StatusSettings]) -> int:
    """Print what the frontend sees. Exit status: 0 healthy, 1 unhealthy. Raises FrontendError."""
    client = Client(parsed.settings)
    if parsed.settings.brief:
        health = client.get("/health", Health)
        sys.stdout.write(f"{_counts(health)}\n")
        return int(health.status != "healthy")
    code, screen = _look(client)
    console = stdout()
    console.width = max(console.width, _LEAST_COLUMNS)  # a narrower terminal breaks lines, not the table
    console.print(screen)
    return code


def top(parsed: Parsed[TopSettings]) -> int:
    """Show the fleet until Ctrl-C. Exit status: 0; with `--count` that of status, 2 while no frontend
    answers. Raises FrontendError if none answers at first."""
    count, console, client = parsed.settings.count, stdout(), Client(parsed.settings)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the terminal is restored
    is_live = count is None and console.is_interactive
    with contextlib.suppress(KeyboardInterrupt):
        code, screen = _look(client)  # an error comes before the screen changes
        shown = Live(console=console, screen=True, auto_refresh=False) if is_live else None
        with shown or contextlib.nullcontext():
            for number in itertools.count(1):
                if shown is not None:
                    shown.update(Group(_HELP, screen), refresh=True)
                else:
                    console.print(screen, "")
                if number == count:
                    return code
                time.sleep(parsed.settings.interval)  # until the next look
                try:
                    code, screen = _look(client)
                except FrontendError as error:
                    code, screen = 2, Group(Text(str(error), "reverse red"))
    return 0


def stdout() -> Console:
    """As wide as the terminal; where it is none, as wide as the lines."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)


def _look(client: Client) -> tuple[int, Group]:
    """0 healthy, 1 unhealthy, and the whole screen. Raises FrontendError."""
    health, fleet = client.get("/health", Health), client.get("/fleet", Snapshot)
    code = int(health.status != "healthy")
    heading = _line(f"{health.status}: {_counts(health)}", "red" if code else "bold")
    roles = {(i.model, i.role) for i in health.instances if i.role is Role.PREFILL or i.kv_transfer}
    absent = sorted({(m, role) for m, _ in roles for _, role in roles} - roles)
    problems = {
        "unreachable": health.unreachable,
        "missing": health.missing,
        "model": [f"{model} has no {role.value} worker, other models have" for model, role in absent],
        "refused worker": health.refused,
        "doubt": health.doubts,
        "cold pair": health.cold_pairs,
        "cut pair": health.cut_pairs,
        "refused pair": health.refused_pairs,
    }
    lines = (_line(f"{what} {each}", "red") for what, found in problems.items() for each in found)
    table = _table(fleet.workers)
    return code, Group(heading, *_rates(fleet), *lines, table, *_slowest(fleet), *_events(fleet))


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _counts(health: Health) -> str:
    roles = Counter(instance.role for instance in health.instances)
    counts = [f"{roles[Role.PREFILL]} prefill", f"{roles[Role.DECODE]} decode"]
    others = {"warming": health.warming, "lost": health.lost, "stuck": health.stuck}
    return ", ".join([*counts, *(f"{len(ids)} {what}" for what, ids in others.items() if ids)])


def _rates(fleet: Snapshot) -> Iterator[Text]:
    rates = f"{fleet.tokens_per_s:,.0f} tokens/s, {fleet.requests_per_s:,.1f} requests/s"
    refused = f", {fleet.refused_per_s:,.1f} refused/s" if fleet.refused_per_s else ""
    yield _line(f"{fleet.num_running} running, {fleet.num_queued} queued, {rates}{refused}")
    if fleet.points:
        _, *series = zip(*map(astuple, fleet.points), strict=True)
        last_s = (next((each for each in reversed(values) if each is not None), None) for values in series)
        ms = ("-" if value_s is None else f"{1000 * value_s:.0f} ms" for value_s in last_s)
        yield _line("TTFT p50 {} p99 {}, ITL p50 {} p99 {}".format(*ms))


def _table(workers: list[WorkerView]) -> Table:
    """Those that are not ready come first."""
    table = Table("WORKER", "ROLE", "STATE", box=None, pad_edge=False, header_style="bold")
    for title in ("RUNNING", "WAITING", "KV", "AGE"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("HOST:PID")
    for worker in sorted(workers, key=lambda worker: worker.state == "ready"):
        style = {"ready": "", "new": "yellow", "warming": "yellow"}.get(worker.state, "red")
        table.add_row(*map(_line, _cells(worker)), style=style)
    return table


def _cells(w: WorkerView) -> Iterator[str]:
    yield from (w.name, w.role.value, w.state)
    yield "-" if w.num_running is None else f"{w.num_running}/{w.places}" if w.places else f"{w.num_running}"
    yield "-" if w.num_waiting is None else f"{w.num_waiting}"
    share = w.kv_used_blocks / w.kv_blocks if w.kv_blocks and w.kv_used_blocks is not None else None
    yield "-" if share is None else f"{'#' * round(5 * min(1.0, share)):.<5} {share:>4.0%}"
    sizes = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
    yield next((f"{w.age_s // size:.0f}{unit}" for size, unit in sizes if w.age_s >= size), "0s")
    speed = "" if w.tokens_per_step is None else f"{w.tokens_per_step:.1f} tokens/step"
    yield " ".join(filter(None, (f"{w.host}:{w.pid}" if w.host else "", w.reason or w.engine, speed)))


def _slowest(fleet: Snapshot) -> Iterator[Text]:
    yield from [_line("SLOWEST of the last five minutes", "bold")] * bool(fleet.slowest)
    for slow in fleet.slowest[:_NUM_SLOWEST]:
        longest = sorted(slow.stages.items(), key=lambda pair: -pair[1])[:3]
        stages = ", ".join(f"{name.replace('_', ' ')} {lasted_s:.2f}" for name, lasted_s in longest)
        text = f"{slow.duration_s:>8.2f} s  {slow.status}  {slow.request_id or '-'}  {slow.verdict or stages}"
        yield _line(text, "red" if slow.status >= 400 else "")


def _events(fleet: Snapshot) -> Iterator[Text]:
    yield from [_line("EVENTS (UTC)", "bold")] * bool(fleet.events)
    for event in fleet.events[:_NUM_EVENTS]:
        at = time.strftime("%m-%d %H:%M:%S", time.gmtime(min(abs(event.at_s), 1 << 32)))
        word = "for" if event.kind == "full" else "after"
        lasted = "" if event.lasted_s is None else f" {word} {event.lasted_s:.1f} s"
        detail = f": {event.detail}" if event.detail else ""
        yield _line(f"{at}  {event.what} {event.kind}{lasted}{detail}")
