"""What a request spends its time on in a worker until its first token."""

import time
from typing import Literal


class Durations:
    """Seconds: in the worker's own queue, for its KV to move, to compute its prompt."""

    __slots__ = ("_since_s", "began_s", "computed_s", "moved_s", "waited_s")

    def __init__(self) -> None:
        self.began_s = self._since_s = time.perf_counter()
        self.waited_s = self.moved_s = self.computed_s = 0.0

    def lap(self, name: Literal["waited_s", "moved_s", "computed_s"]) -> None:
        """Count the time since the last lap, or the beginning."""
        now_s = time.perf_counter()
        setattr(self, name, getattr(self, name) + now_s - self._since_s)
        self._since_s = now_s

    def take(self, *figures_s: float) -> None:
        """Take an engine's own three figures, none longer than the time since the beginning."""
        most_s = time.perf_counter() - self.began_s
        self.waited_s, self.moved_s, self.computed_s = (min(max(0.0, each), most_s) for each in figures_s)

    @property
    def parts(self) -> tuple[float, float, float]:
        """As `Usage` has them."""
        return self.waited_s, self.moved_s, self.computed_s
