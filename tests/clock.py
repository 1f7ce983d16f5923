"""An event loop whose clock jumps to the next timer when idle, so that long waits cost nothing."""

import asyncio
import functools
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPEED = 50.0
_NUM_OWN = 1  # the loop's wake-up socket, for threads


def run_jumping(main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
    """`asyncio.run` in a time that only timers advance, so that limits end exactly (almost, with sockets). A
    hang raises TimeoutError."""

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(bounded())


def now_s() -> float:
    """The running loop's time."""
    return asyncio.get_running_loop().time()


def jumping(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """An async test in such a time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_jumping(test(*args, **kwargs))

    return run


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances time instead of waiting for a timer.

    It waits for running threads. With sockets, time does not jump but runs `_SPEED` times as fast, since sent
    data needs a moment to arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        speed = 1.0 if self.num_working else _SPEED if len(self.get_map()) > _NUM_OWN else math.inf
        began_s = time.monotonic()
        ready = super().select(timeout / speed)
        if not ready:
            self.now_s += timeout
        elif speed == _SPEED:
            self.now_s += min(timeout, (time.monotonic() - began_s) * speed)
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def stand_still(self, seconds: float) -> None:
        """As if the process had been suspended for so long."""
        self._jumping.now_s += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_working += 1
        future.add_done_callback(self._at_rest)
        return future

    def _at_rest(self, _: object) -> None:
        self._jumping.num_working -= 1
