"""What all streams need goes away for a while: they wait for it and go on exactly."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.answers import Stream, whole_answer
from tests.conftest import LaunchServer, ServerProcess
from tests.stack import MODEL, Stack
from tests.waiting import scaled, wait_for

LONG = 400
NUM_STREAMS = 8


@pytest.fixture
def own_nats(launch_nats: LaunchServer) -> Iterator[ServerProcess]:
    """A NATS server that the test may kill."""
    server = launch_nats()
    yield server
    server.kill()


@pytest.fixture
def nats_stack(tmp_path: Path, own_nats: ServerProcess) -> Iterator[Stack]:
    """Over files and NATS: 2 prefill and 2 decode workers."""
    stack = Stack(tmp_path, {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": own_nats.url})
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def tcp_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """Over files and TCP, and the answer of an undisturbed run."""
    stack = Stack(tmp_path_factory.mktemp("tcp"), {"BATON_LIVENESS_S": str(scaled(1.0))})
    yield stack, started(stack, "--wait-for-worker-s", "60")
    stack.stop()


def started(stack: Stack, *frontend: str) -> str:
    """Start two workers of each role; returns the answer of an undisturbed run."""
    stack.frontend(*frontend)
    for role in ("prefill", "decode") * 2:
        stack.worker(role)
    stack.wait_ready(2, 2)
    return whole_answer(stack, LONG)


def running(stack: Stack) -> list[Stream]:
    """Streams that have come to different points."""
    return [Stream(stack, LONG).read(1 + i) for i in range(NUM_STREAMS)]


def check_all(streams: list[Stream], expected: str) -> None:
    for stream in streams:
        stream.read()
        assert (stream.error, stream.finish_reason, stream.text == expected) == (None, "length", True)


def kill_and_restart(nats: ServerProcess) -> None:
    nats.kill()
    time.sleep(1)  # an outage has a length
    nats.start()


def freeze(nats: ServerProcess) -> None:
    nats.freeze()
    time.sleep(scaled(4.0))  # longer than all that notices it
    nats.thaw()


def test_streams_outlive_outages_of_nats(nats_stack: Stack, own_nats: ServerProcess) -> None:
    expected = started(nats_stack)
    for outage in kill_and_restart, freeze:
        streams = running(nats_stack)

        outage(own_nats)

        check_all(streams, expected)
    nats_stack.wait_idle()


def test_streams_wait_for_decode_workers_that_are_started_again(tcp_stack: tuple[Stack, str]) -> None:
    stack, expected = tcp_stack
    streams = running(stack)

    for process in [p for p in stack.processes if p.name.startswith("decode")]:
        process.kill()
        stack.processes.remove(process)
    wait_for(lambda: stack.health()["status"] == "unhealthy")
    refused = httpx.post(f"{stack.url}/v1/completions", json={"model": MODEL, "prompt": "x"})
    stack.worker("decode"), stack.worker("decode")

    check_all(streams, expected)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    stack.wait_ready(2, 2)


def test_streams_outlive_a_frontend_that_stands_still(tcp_stack: tuple[Stack, str]) -> None:
    """For longer than its workers keep what is sent to it."""
    stack, expected = tcp_stack
    streams = running(stack)

    stack.processes[0].signal(signal.SIGSTOP)
    decodes = [process for process in stack.processes if process.name.startswith("decode")]
    wait_for(lambda: all("caller_lost" in decode.text() for decode in decodes))
    stack.processes[0].signal(signal.SIGCONT)

    check_all(streams, expected)
    stack.wait_idle()
