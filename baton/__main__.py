"""`python -m baton`: what an operator asks. who is live, what would break, a model from the hub."""

import dataclasses
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator

import msgspec

from baton.flags import flag, parse

MAX_BODY_BYTES = 1 << 20
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows our own frontend


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusSettings:
    """What `python -m baton status` takes."""

    url: str = flag("http://127.0.0.1:8000", "the frontend", metavar="URL")
    brief: bool = flag(False, "one line: how many workers of each role")


class _Instance(msgspec.Struct):
    worker_id: str
    role: str
    model: str
    engine: str
    kv_transfer: str


class _Health(msgspec.Struct):
    status: str
    instances: list[_Instance]
    missing: list[str]
    warming: list[str] = []
    cold_pairs: list[str] = []
    refused_pairs: list[str] = []


def status(argv: list[str]) -> int:
    """Print the live workers. Exit status: 0 healthy, 1 not, 2 no frontend there."""
    settings = parse(StatusSettings, argv, prog="python -m baton status", description="Who is live.").settings
    try:
        health = _health(settings.url)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        sys.stderr.write(f"error: no frontend answers at {settings.url}: {error}\n")
        return 2
    roles = Counter(instance.role for instance in health.instances)
    counts = f"{roles['prefill']} prefill, {roles['decode']} decode"
    if health.warming:
        counts += f", {len(health.warming)} warming"
    lines = [counts] if settings.brief else [f"{health.status}: {counts}", *_details(health)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if health.status == "healthy" else 1


def _details(health: _Health) -> Iterator[str]:
    yield from (f"missing {name}" for name in health.missing)
    yield from (f"{i.worker_id}  {i.role}  {i.model}  {i.engine}  {i.kv_transfer}" for i in health.instances)
    yield from (f"{worker_id}  warming" for worker_id in health.warming)
    yield from (f"cold pair {pair}" for pair in health.cold_pairs)
    yield from (f"refused pair {reason}" for reason in health.refused_pairs)


def _health(url: str) -> _Health:
    try:
        with _OPENER.open(f"{url}/health", timeout=2) as answer:
            body = answer.read(MAX_BODY_BYTES)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        body = error.read(MAX_BODY_BYTES)
    return msgspec.json.decode(body, type=_Health)


def _doctor(argv: list[str]) -> int:
    from baton.doctor.command import doctor

    return doctor(argv)


def _download(argv: list[str]) -> int:
    from baton.download import download

    return download(argv)


_COMMANDS = {"status": status, "doctor": _doctor, "download": _download}


def main(argv: list[str]) -> int:
    """Run a subcommand; 2 if there is none of that name."""
    if not argv or argv[0] not in _COMMANDS:
        sys.stderr.write(f"usage: python -m baton {{{','.join(_COMMANDS)}}} [--help]\n")
        return 2
    return _COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
