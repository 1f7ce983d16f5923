"""What happens to the fleet: the newest events, each of which is one line of the log."""

import asyncio
import logging
import time
from collections import Counter, deque
from typing import Literal

import msgspec

from baton.telemetry import Line

log = logging.getLogger(__name__)

Kind = Literal["joined", "left", "lost", "recovered", "cut", "restored", "refused", "full"]

_NUM_KEPT = 200
_FULL_KEPT_S = 10.0
"""A pool that is full again so soon after has been full all the time."""
_LEVELS = {"lost": logging.WARNING, "cut": logging.WARNING, "full": logging.WARNING, "refused": logging.ERROR}
_SUBJECTS = {"cut": "pair", "restored": "pair", "full": "pool"}


class FleetEvent(msgspec.Struct, kw_only=True):
    """`at_s` is Unix time. `what`: the worker's name, the pair or the pool. `lasted_s`: how long a worker was
    away, a pair cut or a pool full; None if it is not over, or has no duration."""

    at_s: float
    kind: Kind
    what: str
    detail: str = ""
    lasted_s: float | None = None


class Events:
    """The newest events of this frontend process."""

    def __init__(self) -> None:
        self._kept: deque[FleetEvent] = deque(maxlen=_NUM_KEPT)
        self.counts: Counter[tuple[Kind, str]] = Counter()
        """Losses and cuts since the start, by kind and worker or pair."""
        self._full: dict[
            str, tuple[FleetEvent, float]
        ] = {}  # by pool, with the time at which it was full last

    def add(self, kind: Kind, what: str, detail: str = "", lasted_s: float | None = None) -> FleetEvent:
        """Keep an event that happens now, and log it."""
        event = FleetEvent(at_s=time.time(), kind=kind, what=what, detail=detail, lasted_s=lasted_s)
        self._kept.append(event)
        if kind in {"lost", "cut"}:
            self.counts[kind, what] += 1
        subject = _SUBJECTS.get(kind, "worker")
        fields = {subject: what, "away_s": lasted_s and round(lasted_s, 3), "detail": detail}
        log.log(_LEVELS.get(kind, logging.INFO), Line(f"{subject} {kind}", **fields))
        return event

    def full(self, pool: str, detail: str) -> None:
        """A request waits for this pool, or is refused. One event, until none did so for _FULL_KEPT_S."""
        loop = asyncio.get_running_loop()
        if pool in self._full:
            self._full[pool] = self._full[pool][0], loop.time()
            return
        self._full[pool] = self.add("full", pool, detail), loop.time()
        loop.call_later(_FULL_KEPT_S, self._look, pool, loop.time())

    def newest(self, num: int) -> list[FleetEvent]:
        """The newest events, the newest first."""
        return list(reversed(self._kept))[:num]

    def _look(self, pool: str, began_s: float) -> None:
        loop = asyncio.get_running_loop()
        event, last_s = self._full[pool]
        if (left_s := last_s + _FULL_KEPT_S - loop.time()) > 0:
            loop.call_later(left_s, self._look, pool, began_s)
            return
        del self._full[pool]
        event.lasted_s = last_s - began_s
        log.info(Line("pool not full", pool=pool, full_s=round(event.lasted_s, 3)))
