"""The watchdog of TensorRT-LLM: what it reports, and how its timers and threads end."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, until, wait_for
from workers.engines.trtllm.watchdog import Patience, Watchdog, leaving_after

THREADS = {"trtllm-watchdog", "trtllm-health"}


def watched(check: Callable[[], bool], told: list[str], patience: Patience) -> Watchdog:
    """A watchdog of an LLM with this health check; `told` gets its reports, also an exit."""
    llm: Any = SimpleNamespace(_executor=SimpleNamespace(check_health=check))
    leave: Any = lambda status: told.append(f"exit {status}")  # noqa: E731  one expression

    def on_broken(reason: str) -> None:
        assert threading.current_thread() is threading.main_thread()  # the loop's
        told.append(reason)

    return Watchdog(llm, on_broken, leave=leave, patience=patience)


def threads() -> dict[str, bool]:
    """The watchdog's threads that run, and whether the process may exit without them."""
    return {thread.name: thread.daemon for thread in threading.enumerate() if thread.name in THREADS}


def test_a_call_that_ends_in_time_leaves_no_timer() -> None:
    left: list[int] = []
    before = set(threading.enumerate())
    with leaving_after(3600, left.append, "loading"):
        (timer,) = set(threading.enumerate()) - before
        assert timer.daemon
    timer.join(PATIENCE_S)
    assert not timer.is_alive()
    assert left == []


def raises() -> bool:
    raise OSError("no such executor")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda: False, "TensorRT-LLM reports that it is unhealthy"),
        (raises, "TensorRT-LLM's health check failed: OSError: no such executor"),
    ],
)
async def test_a_failed_health_check_is_reported(check: Callable[[], bool], reason: str) -> None:
    told: list[str] = []
    dog = watched(check, told, Patience(poll_s=0.001))
    await until(lambda: told)
    dog.stop()
    assert set(told) == {reason}


async def test_a_healthy_engine_is_left_alone_for_longer_than_the_limit() -> None:
    told: list[str] = []
    checks: list[int] = []
    patience = Patience(poll_s=0.002, health_s=0.4)

    def check() -> bool:
        checks.append(1)
        return True

    dog = watched(check, told, patience)
    assert threads() == dict.fromkeys(THREADS, True)
    await until(lambda: len(checks) * 4 * patience.poll_s > 1.5 * patience.health_s)
    dog.stop()
    assert "trtllm-watchdog" not in threads()  # the health check may hang
    await until(lambda: not threads())
    assert told == []


def test_the_threads_end_with_the_loop() -> None:
    async def main() -> None:
        watched(lambda: True, [], Patience(poll_s=0.001))

    asyncio.run(main())  # without a stop
    wait_for(lambda: not threads())
