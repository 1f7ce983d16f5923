"""How long this process's event loop stood still."""

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

_PERIOD_S = 0.1
_LEAST_S = 0.01
"""Shorter delays do not count."""
_MAX_KEPT = 100
_WAITS = Path("/proc/thread-self/schedstat")


class Delay(NamedTuple):
    """A loop stood still for `lasted_s`; then, or just before, it waited for a CPU for `starved_s`."""

    lasted_s: float = 0.0
    starved_s: float = 0.0


_NONE = Delay()


def _starved_s() -> float:
    """How long this thread has waited for a CPU since its start; 0 where Linux does not count that."""
    try:
        return int(_WAITS.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


class LoopDelay:
    """A timer that notes how late it fires. It is late too after the process was stopped, or when the loop
    computes: the clock goes on. Times are `perf_counter` values; nothing is noted before `start`."""

    def __init__(self) -> None:
        self._due_s = float("inf")
        self._late: deque[tuple[float, Delay]] = deque(maxlen=_MAX_KEPT)  # by end; longer ones first
        self.starved_s = 0.0
        """How long the thread has waited for a CPU in all, up to the last time that the timer fired."""
        self.seen_s = float("-inf")
        """When the loop ran before any delay that has just ended: work that begins now may have waited since
        then."""

    def start(self) -> None:
        self._due_s, self.starved_s = time.perf_counter(), _starved_s()
        self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.perf_counter()
        late = self._delay(now_s)
        self.starved_s = _starved_s()
        if late.lasted_s:
            while self._late and self._late[-1][1] <= late:
                self._late.pop()
            self._late.append((now_s, late))
        self.seen_s, self._due_s = self._due_s - _PERIOD_S, now_s + _PERIOD_S
        loop.call_later(_PERIOD_S, self._tick, loop)

    def _delay(self, now_s: float) -> Delay:
        """The one that is not noted yet."""
        late_s = now_s - self._due_s
        return Delay(late_s, _starved_s() - self.starved_s) if late_s > _LEAST_S else _NONE

    def longest(self, since_s: float) -> Delay:
        """The longest time since then that the loop stood still, until now if it has only just gone on."""
        now_s, late = time.perf_counter(), self._late
        if now_s - self._due_s <= _LEAST_S and not (late and late[-1][0] > since_s):
            return _NONE  # at once: it is asked for each request
        found = _NONE
        for ended_s, each in (*late, (now_s, self._delay(now_s))):
            lasted_s = min(each.lasted_s, ended_s - since_s)
            if lasted_s > found.lasted_s:
                found = Delay(lasted_s, min(each.starved_s, lasted_s))
        return found
