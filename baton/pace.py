"""How often links beat, after how much silence a worker is lost, and a wait for tasks."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

LIVENESS_S = 2.0
"""A worker that is silent for this long is lost: its callers resume on another one."""
TICK_S = 0.25


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A plane's timing: a heartbeat each `tick_s`; a worker is lost after `num_silent` silent ticks."""

    tick_s: float
    num_silent: int

    @classmethod
    def of(cls, liveness_s: float) -> "Pace":
        tick_s = min(TICK_S, liveness_s / 4)
        return cls(tick_s=tick_s, num_silent=round(liveness_s / tick_s))


class Pulse:
    """Calls `tick` every `tick_s` until stopped."""

    def __init__(self, tick_s: float, tick: Callable[[], None]) -> None:
        self._tick_s = tick_s
        self._tick = tick
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(tick_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._beat)
        self._tick()


async def first_done(*tasks: "asyncio.Task[Any]") -> None:
    """Wait until one of the tasks has ended, with fewer calls than `asyncio.wait`."""
    ended = asyncio.Future[None]()

    def end(_: object) -> None:
        if not ended.done():
            ended.set_result(None)

    for task in tasks:
        task.add_done_callback(end)
    await ended
