"""Asks etcd and NATS for access, with the clients of frontend and workers."""

import asyncio
import dataclasses
import os
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
"""Limit for one server: a name server may hang, a peer may send a byte a second."""
_ONCE: dict[str, Any] = {
    "allow_reconnect": False,
    "max_reconnect_attempts": 1,
    "reconnect_time_wait": 0,
    "connect_timeout": 3,
}
# nats-py's own errors, and those of its parser: another program may listen there.
_NATS_ERRORS = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, nats.errors.Error)


async def probe_services(wires: Wires) -> tuple[Service, ...]:
    """Ask every etcd and NATS server in use, all at a time."""
    used = str(wires)
    probes = [probe_etcd(wires, url) for url in wires.etcd_urls if "discovery=etcd" in used]
    probes += [probe_nats(url) for url in wires.nats_urls if "plane=nats" in used]
    return tuple(await asyncio.gather(*probes))


async def probe_etcd(wires: Wires, url: str) -> Service:
    """Read the registry at this member of the cluster."""
    service = Service(name="etcd", url=without_secrets(url))
    etcd = dataclasses.replace(wires, discovery_backend="etcd", etcd_endpoints=url).discovery()
    assert isinstance(etcd, EtcdDiscovery)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await etcd.check_access()
    except EtcdError as error:
        return replace(service, problem=str(error), is_refusal=error.refused)
    except TimeoutError:
        return replace(service, problem=f"no answer in {TIMEOUT_S:.0f} s")
    finally:
        await etcd.close()
    return service


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
    except TimeoutError:
        return replace(service, problem=f"no answer in {TIMEOUT_S:.0f} s")
    except _NATS_ERRORS as error:
        if not isinstance(error, nats.errors.NoServersError):
            await note(error)
        why = without_secrets(errors[-1])
        return replace(service, problem=why, is_refusal="authorization" in why.lower())
    finally:
        await client.close()
    return service
