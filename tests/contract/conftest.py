"""Fixtures of several contract tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisors import Start, Supervised


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
