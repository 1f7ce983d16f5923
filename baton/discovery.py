"""The seam to the registry: who is alive, kept current."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.messages import WorkerInfo


class Discovery(Protocol):
    """A registry of workers. Held to its contract by `tests/contract/test_discovery.py`.

    * A registered worker is seen by every watcher, soon; leaving the context withdraws it at once.
    * Dying withdraws: a killed process vanishes within the lease's time, without anybody's help.
    * Losing the registry loses nobody: watchers keep the last snapshot, registrations heal by themselves.
    """

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        """Keep `info` registered while the context is open; waits until it is written the first time."""
        ...

    def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """Full snapshots, ordered by worker id: one at once, then one for each change."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
