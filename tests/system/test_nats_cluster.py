"""Streams over a cluster of three NATS servers, each of which is killed in turn."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ServerProcess, binary, free_port
from tests.stack import Stack
from tests.system.test_outages import check_all, running, started
from tests.waiting import wait_for

NUM_SERVERS = 3


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(NUM_SERVERS)]
    found = []
    for number, route in enumerate(routes):
        url = f"nats://127.0.0.1:{free_port()}"
        command = [binary("nats-server", "nats-server"), "-a", "127.0.0.1", "-p", url.rpartition(":")[2]]
        command += ["--cluster_name", "baton", "--cluster", route, "--routes", ",".join(routes)]
        found.append(ServerProcess(command, url, tmp_path / f"nats-{number}", ready=b"Server is ready"))
        found[-1].start()
    yield found
    for server in found:
        server.kill()


@pytest.fixture
def stack(servers: list[ServerProcess], tmp_path: Path) -> Iterator[Stack]:
    """Over files and the cluster."""
    urls = ",".join(server.url for server in servers)
    stack = Stack(tmp_path, {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": urls})
    yield stack
    stack.stop()


def test_streams_outlive_each_server_of_a_cluster(stack: Stack, servers: list[ServerProcess]) -> None:
    expected = started(stack)
    for server in servers:
        streams = running(stack)

        server.kill()

        check_all(streams, expected)
        server.start()
    for process in stack.processes:
        assert "plane=unreachable" in process.text()  # it was connected to one of them
    wait_for(lambda: stack.health()["status"] == "healthy")
    stack.wait_idle(
        30
    )  # workers whose own server lived keep a silent caller for three times the liveness limit
