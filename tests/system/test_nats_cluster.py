"""Streams over a cluster of three NATS servers, each of which is killed in turn, and over a leaf node."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.answers import read_all, whole_answer
from tests.conftest import LaunchServer, ServerProcess, free_port
from tests.stack import Stack
from tests.system.test_outages import LONG, running, started
from tests.waiting import wait_for

NUM_SERVERS = 3


@pytest.fixture
def servers(launch_nats: LaunchServer) -> Iterator[list[ServerProcess]]:
    routes = [f"nats://127.0.0.1:{free_port()}" for _ in range(NUM_SERVERS)]
    known = ("--cluster_name", "baton", "--routes", ",".join(routes))
    found = [launch_nats("--cluster", route, *known) for route in routes]
    yield found
    for server in found:
        server.kill()


@pytest.fixture
def stack(servers: list[ServerProcess], tmp_path: Path) -> Iterator[Stack]:
    """Over files and the cluster."""
    urls = ",".join(server.url for server in servers)
    with Stack(tmp_path, {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": urls}) as stack:
        yield stack


def test_streams_outlive_each_server_of_a_cluster(stack: Stack, servers: list[ServerProcess]) -> None:
    expected = started(stack)
    for server in servers:
        streams = running(stack)

        server.kill()

        read_all(streams, expected)
        server.start()
    for process in stack.processes:
        assert "plane=unreachable" in process.text()  # it was connected to one of them
    wait_for(lambda: stack.health()["status"] == "healthy")
    stack.wait_idle()


@pytest.fixture
def hub_and_leaf(launch_nats: LaunchServer, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two servers: the second one connects to the first as its leaf node."""
    address = f"127.0.0.1:{free_port()}"
    leafnodes = {"hub": f'listen: "{address}"', "leaf": f'remotes: [{{url: "nats-leaf://{address}"}}]'}
    found = []
    for name, options in leafnodes.items():
        config = tmp_path / f"{name}.conf"
        config.write_text(f"leafnodes {{ {options} }}\n")
        found.append(launch_nats("-c", str(config)))
    yield found
    for server in found:
        server.kill()


def test_streams_cross_a_leaf_node_and_outlive_it(hub_and_leaf: list[ServerProcess], tmp_path: Path) -> None:
    hub, leaf = hub_and_leaf
    with Stack(tmp_path, {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": hub.url}) as stack:
        stack.frontend("--wait-for-worker-s", "60")
        stack.environ["NATS_SERVER"] = leaf.url
        for role in ("prefill", "decode") * 2:
            stack.worker(role)
        stack.wait_ready(2, 2)
        expected = whole_answer(stack, LONG)
        streams = running(stack)

        leaf.kill()
        wait_for(lambda: all("plane=unreachable" in process.text() for process in stack.processes[1:]))
        leaf.start()

        read_all(streams, expected)
        stack.wait_idle()
