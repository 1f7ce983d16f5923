"""Fixtures and event loops of several contract tests."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.supervisors import Start, Supervised


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests with the mark run on uvloop."""
    if item.get_closest_marker("uvloop"):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor, and waits until its processes are ready and it offers its port."""
    started: list[Supervised] = []

    def start(num_processes: int, failure: str = "") -> Supervised:
        started.append(Supervised(tmp_path, num_processes, failure))
        if not failure:
            started[0].wait_logged("process_ready", num_processes)
            started[0].wait_logged("serving")
        return started[0]

    yield start
    for each in started:
        each.kill()  # its processes end with it
