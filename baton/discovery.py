"""The Discovery protocol: a registry of live workers."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
    * When the registry is unreachable, watchers keep the last snapshot and registrations recover."""

    problem: str  # why the registry does not answer; empty while it does

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Keep `info` registered while the context is open; returns after the first write. It replaces an
        earlier registration of the same worker id, whose end then withdraws nothing."""
        ...

    def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """Full snapshots ordered by worker id: one once the registry has answered, then one per change."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


@asynccontextmanager
async def kept(
    hold: Callable[[], Awaitable[bool]], *, every_s: float, retry_s: float
) -> AsyncGenerator[None, None]:
    """Call `hold` until it has written a registration; then, while the context is open, every `every_s` or,
    when it fails, after `retry_s`. The first call may raise."""
    while not await hold():  # noqa: ASYNC110  registries do not notify
        await asyncio.sleep(retry_s)  # the registry is unreachable or full: retry after a pause

    async def keep() -> None:
        pause_s = every_s
        while True:
            await asyncio.sleep(pause_s)  # until the registration needs renewal
            pause_s = every_s if await hold() else min(every_s, retry_s)

    keeper = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)


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
