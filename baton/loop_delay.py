"""How long this process's event loop stood still."""

import asyncio
import time
from bisect import bisect_right

_PERIOD_S = 0.1
_LEAST_S = 0.01
"""Shorter delays are not kept."""
_MAX_KEPT = 1000


class LoopDelay:
    """A timer that notes how late it fires. It is late too after the process was stopped, or when the loop
    computes: the clock goes on. Times are `perf_counter` values; nothing is noted before `start`."""

    def __init__(self) -> None:
        self._due_s = float("inf")
        self._seen_s = self._last_s = float("-inf")
        # Only those that no later delay exceeds: the longest since an instant is the first since then.
        self._ended_s: list[float] = []
        self._lasted_s: list[float] = []

    def start(self) -> None:
        """Begin, in the running loop."""
        self._due_s = self._last_s = time.perf_counter()
        self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = time.perf_counter()
        if now_s - self._due_s > _LEAST_S:
            self._note(now_s, now_s - self._due_s)
        self._seen_s, self._last_s = self._last_s, now_s
        self._due_s = now_s + _PERIOD_S
        loop.call_later(_PERIOD_S, self._tick, loop)

    def _note(self, now_s: float, lasted_s: float) -> None:
        while self._lasted_s and self._lasted_s[-1] <= lasted_s:
            self._lasted_s.pop()
            self._ended_s.pop()
        if len(self._lasted_s) == _MAX_KEPT:
            del self._lasted_s[0], self._ended_s[0]
        self._lasted_s.append(lasted_s)
        self._ended_s.append(now_s)

    @property
    def seen_s(self) -> float:
        """When the loop ran before any delay that has just ended: work that begins now may have waited since
        then."""
        return self._seen_s

    def longest_s(self, since_s: float) -> float:
        """The longest time since then that the loop stood still, until now if it has only just gone on."""
        now_s = time.perf_counter()
        late_s = now_s - self._due_s
        longest_s = min(late_s, now_s - since_s) if late_s > _LEAST_S else 0.0
        first = bisect_right(self._ended_s, since_s)
        if first < len(self._ended_s):  # it may have begun before `since_s`, no later one has
            longest_s = max(longest_s, min(self._lasted_s[first], self._ended_s[first] - since_s))
            longest_s = max([longest_s, *self._lasted_s[first + 1 : first + 2]])
        return longest_s
