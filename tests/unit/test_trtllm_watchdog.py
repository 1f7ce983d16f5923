"""The watchdog of TensorRT-LLM: what it reports, and how its timers and threads end."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.waiting import PATIENCE_S, until
from workers.engines.trtllm.watchdog import Patience, Watchdog

THREADS = {"trtllm-loop", "trtllm-health"}


def watchdog(check: Callable[[], bool], left: list[int], patience: Patience) -> Watchdog:
    """A watchdog of an LLM with this health check."""
    llm = SimpleNamespace(_executor=SimpleNamespace(check_health=check))
    return Watchdog(llm, leave=left.append, patience=patience)


def threads() -> dict[str, bool]:
    """The watchdog's threads that run, and whether the process may exit without them."""
    return {thread.name: thread.daemon for thread in threading.enumerate() if thread.name in THREADS}


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
    async with asyncio.timeout(PATIENCE_S):
        assert await watchdog(check, [], Patience(poll_s=0.001)).broken() == reason
    await until(lambda: not threads())
