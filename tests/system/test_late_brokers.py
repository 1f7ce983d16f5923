"""Processes that start before what they need: they wait and say so, and a signal ends them at once."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.answers import whole_answer
from tests.conftest import LaunchServer, free_port
from tests.stack import Stack, cluster
from tests.waiting import FAILOVER_S, wait_for


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Over etcd and NATS that do not run yet."""
    environ = cluster(f"http://127.0.0.1:{free_port()}", f"nats://127.0.0.1:{free_port()}")
    with Stack(tmp_path, environ) as stack:
        yield stack


def test_a_stack_starts_before_its_brokers(
    stack: Stack, launch_nats: LaunchServer, launch_etcd: LaunchServer
) -> None:
    stack.frontend()
    worker, other = stack.worker("agg"), stack.worker("agg")
    for process in stack.processes:
        wait_for(lambda: "waiting for NATS at nats://127.0.0.1" in process.text())  # noqa: B023  called at once

    began_s = time.monotonic()
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
    assert time.monotonic() - began_s < FAILOVER_S
    stack.processes.remove(other)

    nats = launch_nats("-p", stack.environ["NATS_SERVER"].rpartition(":")[2])
    wait_for(lambda: "waiting for etcd at http://127.0.0.1" in worker.text())
    address = stack.environ["ETCD_ENDPOINTS"]
    etcd = launch_etcd(f"--listen-client-urls={address}", f"--advertise-client-urls={address}")
    stack.wait_ready(0, 1)
    whole_answer(stack, 5)
    assert "Traceback" not in "".join(process.text() for process in stack.processes)
    for server in nats, etcd:
        server.kill()
