"""The seam to the registry: who is alive, kept current."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from baton.messages import WorkerInfo

log = logging.getLogger(__name__)

MAX_WORKERS = 4096
"""More registrations than this are not read."""
MAX_WORKER_BYTES = 64 * 1024
"""A longer registration is not read; real ones are under 1 KiB."""


class Discovery(Protocol):
    """A registry of workers. Held to its contract by `tests/contract/test_discovery.py`.

    * A registered worker is seen by every watcher, soon; leaving the context withdraws it at once.
    * Dying withdraws: a killed process vanishes within the lease's time, without anybody's help.
    * Losing the registry loses nobody: watchers keep the last snapshot, registrations heal by themselves.
    """

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Keep `info` registered while the context is open; waits until it is written the first time. It
        replaces an earlier registration of the same worker id, whose end then withdraws nothing.
        """
        ...

    def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """Full snapshots, ordered by worker id: one at once, then one for each change."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def decode_worker(value: bytes, source: str) -> WorkerInfo | None:
    """The registration that somebody wrote at `source`; None, and a log line, if it is not one."""
    if len(value) > MAX_WORKER_BYTES:
        log.warning("registration=skipped source=%r error=longer than %d bytes", source, MAX_WORKER_BYTES)
        return None
    try:
        return msgspec.json.decode(value, type=WorkerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("registration=skipped source=%r error=%s", source, error)
        return None
