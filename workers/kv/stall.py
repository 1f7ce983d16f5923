"""Ends a pull to which nothing arrives."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from baton.pace import Pulse

STALL_S = 2.0
"""A pull fails when nothing arrives for this long, however much is left of its time."""
_TICKS = 8


class Stall:
    """Lets `limit` expire after STALL_S without `arrived`. It counts ticks, not seconds: a process that stood
    still first reads what has arrived meanwhile.
    """

    def __init__(self, limit: asyncio.Timeout) -> None:
        self._num_quiet: float = 0
        self._limit = limit
        self._pulse = Pulse(STALL_S / _TICKS, self._tick)

    def arrived(self) -> None:
        """Something has arrived."""
        self._num_quiet = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Expect nothing during the context."""
        self._num_quiet = -math.inf
        yield
        self._num_quiet = 0

    def stop(self) -> None:
        """Expect nothing any more."""
        self._pulse.stop()

    def _tick(self) -> None:
        self._num_quiet += 1
        if self._num_quiet == _TICKS:
            self._limit.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def stalling() -> AsyncIterator[Stall]:
    """Raises TimeoutError if nothing arrives during the context for STALL_S."""
    async with asyncio.timeout(None) as limit:
        stall = Stall(limit)
        try:
            yield stall
        finally:
            stall.stop()
