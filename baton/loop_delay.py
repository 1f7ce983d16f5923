"""How long this process's event loop stood still."""

import asyncio
import time
from collections import deque

_PERIOD_S = 0.1
_LEAST_S = 0.01
"""Shorter delays do not count."""
_MAX_KEPT = 100


class LoopDelay:
    """A timer that notes how late it fires. It is late too after the process was stopped, or when the loop
    computes: the clock goes on. Times are `perf_counter` values; nothing is noted before `start`."""

    def __init__(self) -> None:
        self._due_s = float("inf")
        self._late: deque[tuple[float, float]] = deque(maxlen=_MAX_KEPT)  # (end, duration), longer ones first
        self.seen_s = float("-inf")
        """When the loop ran before any delay that has just ended: work that begins now may have waited since
        then."""

    def start(self) -> None:
        """Begin, in the running loop."""
        self._due_s = time.perf_counter()
        self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.perf_counter()
        if (late_s := now_s - self._due_s) > _LEAST_S:
            while self._late and self._late[-1][1] <= late_s:
                self._late.pop()
            self._late.append((now_s, late_s))
        self.seen_s, self._due_s = self._due_s - _PERIOD_S, now_s + _PERIOD_S
        loop.call_later(_PERIOD_S, self._tick, loop)

    def longest_s(self, since_s: float) -> float:
        """The longest time since then that the loop stood still, until now if it has only just gone on."""
        now_s = time.perf_counter()
        late_s = now_s - self._due_s
        now_late = (now_s, late_s if late_s > _LEAST_S else 0.0)
        return max(0.0, *(min(lasted_s, ended_s - since_s) for ended_s, lasted_s in (*self._late, now_late)))
