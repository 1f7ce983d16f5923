"""Fixtures and event loops of several contract tests."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from baton.telemetry import unauthenticated
from baton.transport import Transport
from tests.certificates import Authority
from tests.conftest import LaunchServer, ServerProcess
from tests.kv_peer import WIRES, Far
from tests.planes import Plane


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Those of the mark `loops`."""
    loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    mark = item.get_closest_marker("loops")
    return {name: loops[name] for name in (mark.args if mark else ("asyncio",))}


@pytest.fixture
def own_nats(launch_nats: LaunchServer) -> ServerProcess:
    """A NATS server that the test may kill."""
    return launch_nats()


@pytest.fixture
async def ends(plane: Plane) -> AsyncIterator[tuple[Transport, Transport]]:
    async with plane.ends() as ends:
        yield ends


@pytest.fixture
def caller(ends: tuple[Transport, Transport]) -> Transport:
    return ends[0]


@pytest.fixture
def worker(ends: tuple[Transport, Transport]) -> Transport:
    return ends[1]


@pytest.fixture(scope="module", params=WIRES)
def far(request: pytest.FixtureRequest, shared_authority: Authority) -> Iterator[Far]:
    """One process for all tests that do not kill it."""
    process = Far(request.param)
    yield process.started()
    process.end()


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log, where this process names the next unknown caller."""
    monkeypatch.setattr(unauthenticated, "_logged_s", -math.inf)
    caplog.set_level(logging.INFO)
    return caplog
