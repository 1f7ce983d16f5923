"""Waiting for what must come true, instead of for a time; and times that grow with the machine's slowness."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

# What `_work` takes on one idle core of the usual machine.
_WORK_S = 0.15
_MOST = 10.0


def _work() -> int:
    return sum(i * i % 7 for _ in range(60) for i in range(20_000))


def _measured() -> float:
    """By the clock, so that what else runs here counts."""
    start_s = time.monotonic()
    _work()
    return min(max((time.monotonic() - start_s) / _WORK_S, 1.0), _MOST)


# Measured once: pytest's own processes and those of the tests inherit it.
SLOWNESS: Final = float(os.environ.setdefault("BATON_TESTS_SLOWNESS", f"{_measured():.2f}"))
"""How many times slower this machine is than an idle one, at least 1."""


def scaled(seconds: float) -> float:
    """A time that matters, such as a lease's, for this machine: what fits it elsewhere fits it here."""
    return seconds * SLOWNESS


PATIENCE_S: Final = scaled(60.0)
"""For what must happen at some time: only what hangs takes so long."""


async def until(condition: Callable[[], object], limit_s: float = 60.0, pause_s: float = 0.001) -> None:
    """Return as soon as the condition holds. With a `pause_s` of 0 it is looked at on every turn of the loop.

    Raises TimeoutError if it does not hold in time; `limit_s` is scaled.
    """
    async with asyncio.timeout(scaled(limit_s)):
        while not condition():
            await asyncio.sleep(pause_s)  # nothing tells that a condition came true


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return as soon as the condition holds; fails the test if it does not in time. `timeout_s` is scaled."""
    give_up = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(0.01)  # nothing tells that a condition came true
