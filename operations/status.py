"""`python -m baton status`: the live workers, as the frontend sees them."""

import dataclasses
import ssl
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import msgspec

from baton.flags import flag, parse
from baton.messages import Role
from baton.tls import client_context
from frontend.routing.health import Health

_MAX_HEALTH_BYTES = 1 << 20
_TIMEOUT_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSettings:
    """Flags of `python -m baton status`."""

    url: str = flag("http://127.0.0.1:8000", "the frontend", metavar="URL")
    brief: bool = flag(False, "one line: the number of workers per role")
    insecure: bool = flag(False, "do not check the frontend's certificate")
    tls_cert_file: Path | None = flag(None, "certificate to show, if it asks for one (PEM)", metavar="PATH")
    tls_key_file: Path | None = flag(None, "key of that certificate", metavar="PATH")


def status(argv: list[str]) -> int:
    """Print the live workers. Exit status: 0 healthy, 1 unhealthy, 2 no frontend."""
    settings = parse(
        StatusSettings, argv, prog="python -m baton status", description="Live workers."
    ).settings
    try:
        health = _health(settings)
    except (OSError, HTTPException, ValueError) as error:
        why = str(error).removeprefix("<urlopen error ").removesuffix(">")
        sys.stderr.write(f"error: no frontend answers at {settings.url}: {why}\n")
        return 2
    lines = (
        [_counts(health)] if settings.brief else [f"{health.status}: {_counts(health)}", *_details(health)]
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


def _health(settings: StatusSettings) -> Health:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # none can reach it
    if settings.url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_context(settings)))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(f"{settings.url}/health", timeout=_TIMEOUT_S) as answer:
            body = answer.read(_MAX_HEALTH_BYTES)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        body = error.read(_MAX_HEALTH_BYTES)
    return msgspec.json.decode(body, type=Health)


def _context(settings: StatusSettings) -> ssl.SSLContext:
    context = client_context(None, settings.tls_cert_file, settings.tls_key_file)
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
