"""Checks of etcd and NATS (reachability, access, version, latency, message size) and of the clock."""

from collections.abc import Iterator

from operations.doctor.facts import Facts, Service
from operations.doctor.findings import Finding, error, warning

_BYTES_PER_ID = 5
"""The largest msgpack encoding of a prompt's token id."""
_OLDEST = {"etcd": (3, 4), "NATS": (2, 9)}


def services(facts: Facts) -> Iterator[Finding]:
    """Do etcd and NATS answer quickly, grant access, and accept large enough messages? Are the logins and
    certificates of the environment usable?
    """
    if facts.credential_problem:
        yield error(
            "credentials", facts.credential_problem,
            breaks="frontend and workers exit at start",
            repair="deploy/README.md, Security: each variable and what its file must be",
        )  # fmt: skip
    for service in facts.services:
        if service.problem:
            yield _down(facts, service)
            continue
        yield from _refused(service)
        if service.latency_s > 0.05:
            yield warning(
                "latency", f"{service.name} at {service.url} answers in {service.latency_s * 1e3:.0f} ms",
                breaks="every token of every answer is delayed by as much" if service.name == "NATS"
                else "worker changes are noticed late; leases may expire under load",
                repair="run it on this machine or in this rack",
            )  # fmt: skip
        yield from _payload(facts, service)


def _down(facts: Facts, service: Service) -> Finding:
    fact = f"{service.name} at {service.url}: {service.problem}"
    if any(other.name == service.name and not other.problem for other in facts.services):
        return warning(
            "etcd-member-down", fact,
            breaks="nothing while the other members are a majority",
            repair="restart it, or remove it from ETCD_ENDPOINTS",
        )  # fmt: skip
    variable = "ETCD_ENDPOINTS" if service.name == "etcd" else "NATS_SERVER"
    return error(
        f"{service.name.lower()}-down", fact,
        breaks="workers cannot register" if service.name == "etcd" else "requests cannot reach workers",
        repair=f"docker compose -f deploy/docker-compose.yml up -d, or set {variable}",
    )  # fmt: skip


def _refused(service: Service) -> Iterator[Finding]:
    if service.refusal:
        yield error(
            "login", f"{service.name} at {service.url} denies access: {service.refusal}",
            breaks="frontend and workers exit at start",
            repair="export NATS_SERVER=nats://USER:PASSWORD@HOST:4222",
        )  # fmt: skip
    oldest = _OLDEST[service.name]
    if service.version and service.version < oldest:
        yield error(
            "version-old", f"{service.name} at {service.url} is version {_dotted(service.version)}",
            breaks=f"Baton is tested with {_dotted(oldest)} and newer; older ones lack calls that it needs",
            repair="docker compose -f deploy/docker-compose.yml up -d starts newer ones",
        )  # fmt: skip


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _payload(facts: Facts, service: Service) -> Iterator[Finding]:
    context = facts.model.shape.max_positions if facts.model.shape else 0
    room = service.max_payload_bytes
    if room is not None and room < _BYTES_PER_ID * context:
        yield warning(
            "nats-payload", f"NATS at {service.url}: max_payload is {room:,} bytes",
            breaks=f"prompts of more than about {room // _BYTES_PER_ID:,} tokens are refused",
            repair="max_payload: 15728640 in the server's configuration (deploy/nats.conf)",
        )  # fmt: skip


def clock(facts: Facts) -> Iterator[Finding]:
    """Is the clock plausible, and in sync with etcd's?"""
    if facts.host.year < 2025:
        yield error(
            "clock", f"this machine's clock says {facts.host.year}",
            breaks="TLS certificates are not valid yet; downloads and tokens are refused",
            repair="timedatectl set-ntp true",
        )  # fmt: skip
    for service in facts.services:
        if service.clock_ahead_s is not None and abs(service.clock_ahead_s) > 5:
            yield warning(
                "clock-skew", f"this machine's clock is off by {service.clock_ahead_s:+.0f} s from "
                f"{service.url}'s",
                breaks="logs and traces of one request do not line up; handoff ids contain wrong times",
                repair="timedatectl set-ntp true, on both",
            )  # fmt: skip
