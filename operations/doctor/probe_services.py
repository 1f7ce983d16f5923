"""Asks etcd and NATS for access, latency and version, with the clients of frontend and workers."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from msgspec.structs import replace
from nats.aio.client import Client

from baton.connect import Wires
from baton.etcd import EtcdDiscovery
from baton.etcd_rpc import EtcdError
from baton.flags import without_secrets
from baton.nats_login import nats_options
from operations.doctor.facts import Service

TIMEOUT_S = 10.0
"""Limit for all questions to a server: a name server may hang, a peer may send a byte a second."""
_NUM_QUESTIONS = 3
_ONCE: dict[str, Any] = {
    "allow_reconnect": False,
    "max_reconnect_attempts": 1,
    "reconnect_time_wait": 0,
    "connect_timeout": 3,
}
# nats-py's own errors, and those of its parser: another program may listen there.
_NATS_ERRORS = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, nats.errors.Error)


async def probe_services(wires: Wires) -> tuple[Service, ...]:
    """Ask every etcd and NATS server in use, all at a time. A login that cannot be used asks nothing."""
    used = str(wires)
    asked = [probe_etcd(wires, url) for url in wires.etcd_urls if "discovery=etcd" in used]
    asked += [probe_nats(url) for url in wires.nats_urls if "plane=nats" in used]
    return tuple(await asyncio.gather(*asked))


async def probe_etcd(wires: Wires, url: str) -> Service:
    """Read the registry and the version at this member of the cluster."""
    service = Service(name="etcd", url=without_secrets(url))
    try:
        etcd = dataclasses.replace(wires, discovery_backend="etcd", etcd_endpoints=url).discovery()
    except (OSError, ValueError) as error:
        return replace(service, problem=str(error))
    assert isinstance(etcd, EtcdDiscovery)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            version = await etcd.version()
            latency_s = await _latency_s(etcd.version)
    except EtcdError as error:
        return replace(service, **{"refusal" if error.refused else "problem": str(error)})
    except TimeoutError:
        return replace(service, problem=f"no answer in {TIMEOUT_S:.0f} s")
    finally:
        await etcd.close()
    return replace(service, latency_s=latency_s, version=tuple(map(int, version.split(".")[:2])))


async def probe_nats(url: str) -> Service:
    """Connect and log in to this server."""
    service = Service(name="NATS", url=without_secrets(url))
    client, errors = Client(), ["no answer"]

    async def note(error: Exception) -> None:
        number = getattr(error, "errno", None)
        errors.append(os.strerror(number) if number else str(error) or type(error).__name__)

    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.connect([url], error_cb=note, **_ONCE, **nats_options())
            latency_s = await _latency_s(client.flush)
    except TimeoutError:
        return replace(service, problem=f"no answer in {TIMEOUT_S:.0f} s")
    except _NATS_ERRORS as error:
        if not isinstance(error, nats.errors.NoServersError):
            await note(error)
        why = without_secrets(errors[-1])
        return replace(service, **{"refusal" if "authorization" in why.lower() else "problem": why})
    else:
        version = client.connected_server_version
        return replace(
            service,
            latency_s=latency_s,
            version=(version.major, version.minor),
            max_payload_bytes=client.max_payload,
        )
    finally:
        await client.close()


async def _latency_s(ask: Callable[[], Awaitable[object]]) -> float:
    """The best of three."""
    latencies_s = []
    for _ in range(_NUM_QUESTIONS):
        begin_s = time.perf_counter()
        await ask()
        latencies_s.append(time.perf_counter() - begin_s)
    return min(latencies_s)
