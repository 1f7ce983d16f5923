"""Process life: run on uvloop, drain on the first signal, exit at once on the second."""

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import uvloop

from baton.listener import raise_descriptor_limit
from baton.telemetry import leave

START_S = 60.0
"""How long a process waits at start for what it needs: brokers often start at the same time."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread that reads a long body, say, keeps the event loop waiting; Python's default is 5 ms."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

T = TypeVar("T")
log = logging.getLogger(__name__)


class NotStarted(Exception):
    """What a process needs did not come in time at start, or has ended. The message is for the operator."""


def leave_start_uncollected() -> None:
    """Call once, when everything is imported: objects made so far are left out of this process's garbage
    collections, which are then short, and come less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop; returns its exit status, 1 after NotStarted. `main` gets an event that the first
    SIGTERM or SIGINT sets, for it to drain; the second ends the process."""
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    async def listening() -> int:
        shutdown = asyncio.Event()

        def on_signal(number: int) -> None:
            name = signal.Signals(number).name
            if shutdown.is_set():
                log.warning("forced signal=%s", name)
                leave(128 + number)
            log.info("draining signal=%s", name)
            shutdown.set()

        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        try:
            return await main(shutdown)
        except NotStarted as error:
            log.error("%s", error)  # noqa: TRY400  a message for the operator
            return 1

    return uvloop.run(listening())


@contextmanager
def dying_at_once() -> Iterator[None]:
    """Signals end the process while something loads, which may block the loop: nothing is to be drained."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(status: int) -> NoReturn:
    """End the process. Threads of Dynamo's runtime may still call Python, and crash once that has ended."""
    if "dynamo._core" in sys.modules:
        leave(status)
    sys.exit(status)


async def needed(what: str, wait: Awaitable[T]) -> T:
    """Wait for `what` at start, with a line a second. Raises NotStarted after START_S."""
    waiting = asyncio.ensure_future(wait)
    try:
        for waited_s in range(round(START_S)):
            if waited_s:
                log.warning("waiting for %s waited_s=%d limit_s=%g", what, waited_s, START_S)
            done, _ = await asyncio.wait([waiting], timeout=1.0)
            if done:
                return await waiting
        raise NotStarted(f"{what} did not answer within {START_S:g} s; start it, or check address and login")
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def first_of(*waits: Awaitable[T]) -> T:
    """The result of the coroutine that ends first; the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
