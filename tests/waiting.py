"""Waiting for conditions instead of sleeping, and times scaled by the machine's speed."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

# The time of `_work` on one idle core of the reference machine.
_WORK_S = 0.15
_MOST = 10.0


def _work() -> int:
    return sum(i * i % 7 for _ in range(60) for i in range(20_000))


def _measured() -> float:
    """Wall-clock time, so that other load counts."""
    start_s = time.monotonic()
    _work()
    return min(max((time.monotonic() - start_s) / _WORK_S, 1.0), _MOST)


# Measured once: pytest's worker processes and the tests' processes inherit it.
SLOWNESS: Final = float(os.environ.setdefault("BATON_TESTS_SLOWNESS", f"{_measured():.2f}"))
"""How many times slower this machine is than an idle reference machine, at least 1."""


def scaled(seconds: float) -> float:
    """A duration, such as a lease's, scaled for this machine."""
    return seconds * SLOWNESS


FAILOVER_S: Final = scaled(20.0)
"""A wide limit for what a fault costs: without the mechanism under test it costs a minute or the answer."""

PATIENCE_S: Final = scaled(60.0)
"""A limit for events without a deadline: only a hang takes so long."""


async def until(condition: Callable[[], object], limit_s: float = 60.0, pause_s: float = 0.001) -> None:
    """Return when the condition holds. With a `pause_s` of 0 it is checked on every turn of the loop.

    Raises TimeoutError otherwise; `limit_s` is scaled."""
    async with asyncio.timeout(scaled(limit_s)):
        while not condition():
            await asyncio.sleep(pause_s)  # poll: conditions do not notify


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return when the condition holds; fails the test otherwise. `timeout_s` is scaled."""
    give_up = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        time.sleep(0.01)  # poll: conditions do not notify


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal; after SIGSTOP, return when the process stands still: until then its threads go on."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        wait_for(lambda: thread_states(pid) <= set("TZX"))


def thread_states(pid: int) -> set[str]:
    """The states of its threads, as in proc(5)."""
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            states.add(thread.read_text().rpartition(")")[2].split()[0])
    return states
