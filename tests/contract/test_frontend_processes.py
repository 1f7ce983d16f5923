"""`python -m frontend --num-processes 2`, without workers: one address, one count, one end."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack import Process, Stack
from tests.waiting import wait_for


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path, {"TMPDIR": str(tmp_path)})
    yield made
    made.stop()


def is_ready(process: Process) -> bool:
    return process.text().count("process_ready") == 2


def num_refused(stack: Stack) -> float:
    page = httpx.get(f"{stack.url}/metrics", verify=False).text
    return sum(map(float, re.findall(r'^baton_requests_total\{.*status="503"\} (\S+)$', page, re.MULTILINE)))


def test_the_processes_of_a_frontend_count_and_end_together_and_the_next_ones_take_over(
    stack: Stack, tmp_path: Path
) -> None:
    first = stack.frontend("--num-processes", "2")
    wait_for(lambda: is_ready(first))
    for _ in range(4):  # in turn
        body = {"model": "m", "prompt": "Hi"}
        assert httpx.post(f"{stack.url}/v1/completions", json=body, verify=False).status_code == 503
    assert num_refused(stack) == 4
    [folder] = tmp_path.glob("baton-frontend-*")
    assert folder.stat().st_mode & 0o077 == 0

    second = stack.next_frontend("--num-processes", "2")
    assert first.wait() == 0
    assert not folder.exists()
    wait_for(lambda: is_ready(second))
    assert num_refused(stack) == 0
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
