"""Waiting for what must come true, instead of for a time."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], limit_s: float = 20.0, pause_s: float = 0.001) -> None:
    """Return as soon as the condition holds. With a `pause_s` of 0 it is looked at on every turn of the loop.

    Raises TimeoutError if it does not hold in time.
    """
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(pause_s)  # nothing tells that a condition came true


def wait_for(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return as soon as the condition holds; fails the test if it does not in time."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(0.01)  # nothing tells that a condition came true
