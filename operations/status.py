"""`python -m baton status`: the live workers, as the frontend sees them."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator

from baton.flags import flag, parse
from baton.messages import Role
from frontend.routing.health import Health
from operations.client import Client, FrontendError, FrontendFlags


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSettings(FrontendFlags):
    """Flags of `python -m baton status`."""

    brief: bool = flag(False, "one line: the number of workers per role")


def status(argv: list[str]) -> int:
    """Print the live workers. Exit status: 0 healthy, 1 unhealthy, 2 no frontend."""
    parsed = parse(StatusSettings, argv, prog="python -m baton status", description="Live workers.")
    try:
        health = Client(parsed).get("/health", Health)
    except FrontendError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    lines = (
        [_counts(health)]
        if parsed.settings.brief
        else [f"{health.status}: {_counts(health)}", *_details(health)]
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if health.status == "healthy" else 1


def _counts(health: Health) -> str:
    roles = Counter(instance.role for instance in health.instances)
    counts = [f"{roles[Role.PREFILL]} prefill", f"{roles[Role.DECODE]} decode"]
    others = {"warming": health.warming, "lost": health.lost, "stuck": health.stuck}
    return ", ".join([*counts, *(f"{len(ids)} {what}" for what, ids in others.items() if ids)])


def _details(health: Health) -> Iterator[str]:
    yield from (f"missing {name}" for name in health.missing)
    for i in health.instances:
        yield f"{i.worker_id}  {i.role.value}  {i.model}  {i.engine}  {i.kv_transfer}"
    yield from (f"{worker_id}  warming" for worker_id in health.warming)
    yield from (f"{worker_id}  lost" for worker_id in health.lost)
    yield from (f"{worker_id}  stuck" for worker_id in health.stuck)
    yield from (f"refused worker {reason}" for reason in health.refused)
    yield from (f"cold pair {pair}" for pair in health.cold_pairs)
    yield from (f"cut pair {pair}" for pair in health.cut_pairs)
    yield from (f"refused pair {reason}" for reason in health.refused_pairs)
