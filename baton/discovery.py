"""The Discovery protocol: a registry of live workers."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from baton.messages import UNDECODABLE, WorkerInfo
from baton.telemetry import unauthenticated

log = logging.getLogger(__name__)

MAX_WORKERS = 4096
"""Maximum number of registrations; further ones are ignored."""
MAX_WORKER_BYTES = 64 * 1024
"""Maximum size of a registration; larger ones are ignored, real ones are under 1 KiB."""


class Discovery(Protocol):
    """A registry of workers. Contract: `tests/contract/test_discovery.py`.

    * Every watcher soon sees a registered worker; leaving the context withdraws it at once.
    * A killed process disappears within the lease's time.
    * When the registry is unreachable, watchers keep the last snapshot and registrations recover.
    """

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Keep `info` registered while the context is open; returns after the first write. It replaces an
        earlier registration of the same worker id, whose end then withdraws nothing.
        """
        ...

    def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """Full snapshots ordered by worker id: one at once, then one per change."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def decode_worker(value: bytes, source: str) -> WorkerInfo | None:
    """Decode the registration at `source`; None, with a log line, if it is invalid."""
    problem: object = f"longer than {MAX_WORKER_BYTES} bytes"
    if len(value) <= MAX_WORKER_BYTES:
        try:
            return msgspec.json.decode(value, type=WorkerInfo)
        except UNDECODABLE as error:
            problem = error
    log.warning("registration=skipped source=%r error=%s", source, problem)
    unauthenticated.note("the registry")
    return None
