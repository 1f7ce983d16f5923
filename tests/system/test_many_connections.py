"""More connections than a process has descriptors: no process ends, and other clients are served."""

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.stack import MODEL, Process, Stack
from tests.waiting import PATIENCE_S, wait_for

NUM_CONNECTIONS = 400
NUM_DESCRIPTORS = 256
SOON_S = 25.0
"""Who waited for an idle connection to be closed would wait 30 s or more."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Ready, each process with a low, fixed limit of descriptors."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.prefix = ("prlimit", f"--nofile={NUM_DESCRIPTORS}:{NUM_DESCRIPTORS}")
        stack.serve("prefill", "decode")
        yield stack


def ask(stack: Stack) -> None:
    """Get a whole answer over a new connection."""
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 5}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=SOON_S)
    assert answer.json()["usage"]["completion_tokens"] == 5


@contextmanager
def connections(port: int, first_bytes: bytes = b"") -> Iterator[list[socket.socket]]:
    """Many connections that send `data` and nothing else."""
    with ExitStack() as opened:
        found = []
        for _ in range(NUM_CONNECTIONS):
            found.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)))
            if first_bytes:
                with suppress(ConnectionError):  # it already had to make room
                    found[-1].sendall(first_bytes)
        yield found


def num_descriptors(process: Process) -> int:
    return len(os.listdir(f"/proc/{process.popen.pid}/fd"))


def plane_ports(stack: Stack) -> set[int]:
    """The ports of the workers' TCP planes, from the registry."""
    registry = Path(stack.environ["BATON_FILE_REGISTRY"])
    cards = [json.loads(path.read_text()) for path in registry.glob("*.json")]
    return {int(re.findall(r":(\d+)/", card["address"])[0]) for card in cards}


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
    ],
    ids=["idle", "half a head", "half a body"],
)
def test_the_frontend_serves_others_while_many_hold_connections(stack: Stack, first_bytes: bytes) -> None:
    frontend = stack.processes[0]
    num_before = num_descriptors(frontend)

    with connections(stack.port, first_bytes):
        for _ in range(5):
            ask(stack)
        assert stack.get("/health").status_code == 200
        assert num_descriptors(frontend) < NUM_DESCRIPTORS - 50

    wait_for(lambda: num_descriptors(frontend) <= num_before + 1)
    ask(stack)


def test_workers_serve_others_while_many_hold_connections_to_their_ports(stack: Stack) -> None:
    workers = stack.processes[1:]
    planes = plane_ports(stack)
    ports = {port for worker in workers for _, port in worker.listening()}
    assert planes < ports, "prefill also has a port for its KV"
    num_before = [num_descriptors(worker) for worker in workers]

    with ExitStack() as opened:
        for port in ports:
            opened.enter_context(connections(port))
        for _ in range(5):
            ask(stack)
        assert max(map(num_descriptors, workers)) < NUM_DESCRIPTORS - 50

    wait_for(lambda: all(num_descriptors(w) <= n + 2 for w, n in zip(workers, num_before, strict=True)))
    ask(stack)
    assert all(process.popen.poll() is None for process in stack.processes)


def test_a_new_frontend_gets_in_where_many_hold_a_workers_plane(stack: Stack) -> None:
    """Kills the frontend of the tests before."""
    stack.processes[0].kill()
    with ExitStack() as opened:
        for port in plane_ports(stack):
            opened.enter_context(connections(port))
        stack.frontend()
        stack.wait_ready(1, 1)
        ask(stack)


def test_the_soft_limit_is_raised_so_that_all_stay(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.prefix = ("prlimit", f"--nofile={NUM_DESCRIPTORS}:4096")
        stack.serve("agg")
        with connections(stack.port) as held:
            for sock in held:
                sock.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert {sock.recv(12) for sock in held} == {b"HTTP/1.1 200"}
        for process in stack.processes:
            limits = Path(f"/proc/{process.popen.pid}/limits").read_text()
            assert re.search(r"Max open files +4096 +4096", limits)
