"""An event loop whose clock jumps to the next timer once nothing else is left to do: hours cost nothing."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_jumping(main: Coroutine[Any, Any, T], limit_s: float = 3600.0) -> T:
    """`asyncio.run` in a time that only timers move, so that a limit ends exactly when it says.

    What hangs raises TimeoutError. Sockets of this process work, other processes are too slow.
    """

    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await main

    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(bounded())


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting for a timer, goes on as if that time had passed; threads at work are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_working = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(timeout if self.num_working else 0)
        if not ready:
            self.now_s += max(0.0, timeout)
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_working += 1
        future.add_done_callback(self._at_rest)
        return future

    def _at_rest(self, _: object) -> None:
        self._jumping.num_working -= 1
