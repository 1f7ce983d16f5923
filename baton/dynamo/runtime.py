"""Dynamo's runtime in this process. It reads its environment once, and blocks while its registry is away."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from dynamo.runtime import DistributedRuntime

_RETRY_S = 0.5
_HOSTS = ("DYN_TCP_RESPONSE_STREAM_HOST", "DYN_TCP_RPC_HOST", "DYN_SYSTEM_HOST")
_ENVIRON = {
    "DYN_LOG": "error",
    "DYN_SELF_HOST_METADATA": "0",  # a worker's card names files, and warns if others cannot fetch them
    "DYN_RUNTIME_INHIBITED_DURATION_SECS": "0",  # a caller has its own list of workers that failed
    "DYN_RUNTIME_NUM_WORKER_THREADS": "1",  # several wait for Python's lock at a time
}
"""What Dynamo's runtime reads, unless the operator has set it."""
_PORTS = {"http": 2379, "https": 2379, "nats": 4222, "tls": 4222}


def dynamo_namespace() -> str:
    """As Dynamo's own commands have it."""
    suffix = os.environ.get("DYN_NAMESPACE_WORKER_SUFFIX")
    return os.environ.get("DYN_NAMESPACE", "dynamo") + (f"-{suffix}" if suffix else "")


def dynamo_plane() -> str:
    """What carries requests to Dynamo's workers: tcp or nats."""
    return os.environ.get("DYN_REQUEST_PLANE") or "tcp"


async def start_runtime(
    backend: str, host: str, clusters: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> "DistributedRuntime":
    """The runtime, once a server of each cluster accepts connections.

    `backend`: etcd or file. `clusters` are servers by the variable in which Dynamo reads them; those that
    answer at the start are used, since its client of etcd fails now and then while one does not. `environ` is
    set for Dynamo beside what the operator has set; `host` is the only address that it listens on."""
    os.environ.update(environ)
    for name, urls in clusters.items():
        while not (live := [url for url in urls if await _accepts(url)]):  # noqa: ASYNC110  it does not notify
            await asyncio.sleep(_RETRY_S)  # before the next look
        os.environ[name] = ",".join(live)
    for name, value in (_ENVIRON | dict.fromkeys(_HOSTS, host)).items():
        os.environ.setdefault(name, value)
    from dynamo.runtime import DistributedRuntime  # noqa: PLC0415  it reads the environment

    return DistributedRuntime(asyncio.get_running_loop(), backend, dynamo_plane())


async def _accepts(url: str) -> bool:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_RETRY_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or _PORTS.get(parts.scheme))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
