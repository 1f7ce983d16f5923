"""The NATS plane while its server is away, and when it returns."""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable

import pytest

from baton.errors import BrokerLost, WorkerLost
from baton.nats import NatsTransport, Publisher
from baton.pace import TICK_S
from baton.transport import Transport
from tests.alive import Newborn
from tests.conftest import LaunchServer, ServerProcess
from tests.planes import Endless, Plane, a_request, tokens
from tests.waiting import scaled, until

LIVENESS_S = scaled(1.0)


@pytest.fixture
def own_nats(launch_nats: LaunchServer) -> ServerProcess:
    """A NATS server that the test may kill."""
    return launch_nats()


@pytest.mark.parametrize("harm", [ServerProcess.kill, ServerProcess.freeze])
def test_an_outage_is_logged_once_when_it_begins_and_when_it_ends(
    own_nats: ServerProcess, harm: Callable[[ServerProcess], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton")

    async def scenario(caller: Transport, worker: Transport) -> None:
        endless = Endless()
        async with worker.serve("1", endless.answer) as first, worker.serve("2", endless.answer) as second:
            calls = [caller.call(address, a_request()) for address in (first, second)]
            for call in calls:
                await anext(call)
            harm(own_nats)
            for call in calls:
                with pytest.raises(BrokerLost):
                    await anext(call)
            await asyncio.to_thread(own_nats.thaw if harm is ServerProcess.freeze else own_nats.start)
            await caller.reachable()
            await worker.reachable()

    Plane("nats-asyncio", own_nats.url).run(scenario, liveness_s=LIVENESS_S)
    num_outages = caplog.text.count("plane=unreachable")
    assert num_outages in {1, 2}  # the caller's; the worker may not have noticed one that was short
    assert caplog.text.count("plane=reachable") == num_outages
    assert not [
        each for each in caplog.records if each.message.startswith("nats_error") and each.levelno > 10
    ]


def test_workers_get_time_to_return_before_calls_go_to_them(own_nats: ServerProcess) -> None:
    async def scenario(caller: Transport, worker: Transport) -> None:
        async with worker.serve("w", Endless().answer) as address:
            running = caller.call(address, a_request())
            await anext(running)
            own_nats.freeze()
            with pytest.raises(BrokerLost):
                await anext(running)
            thawed_s = asyncio.get_running_loop().time()
            own_nats.thaw()
            await caller.reachable()
            assert asyncio.get_running_loop().time() - thawed_s >= 2 * TICK_S

    Plane("nats-asyncio", own_nats.url).run(scenario, liveness_s=LIVENESS_S)


async def test_it_reconnects_after_any_number_of_attempts_and_is_limited_as_before(
    own_nats: ServerProcess,
) -> None:
    num_attempts = 0

    async def count(_: Exception) -> None:
        nonlocal num_attempts
        num_attempts += 1

    transport = NatsTransport(own_nats.url, liveness_s=9.0, reconnect_time_wait=0.01, error_cb=count)
    await transport.reachable()
    for num_outages in (1, 2):
        own_nats.kill()
        await until(lambda: num_attempts >= 5 * num_outages)  # noqa: B023  awaited here
        await asyncio.to_thread(own_nats.start)
        async with asyncio.timeout(scaled(10)):
            await transport.reachable()
    (connection,) = connections_to(own_nats.url)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    await transport.close()


def connections_to(url: str) -> list[socket.socket]:
    """This process's connections to the server."""
    found = []
    for each in gc.get_objects():
        if type(each) is socket.socket and each.fileno() >= 0 and each.family == socket.AF_INET:
            with contextlib.suppress(OSError):  # not connected
                if each.getpeername()[1] == int(url.rpartition(":")[2]):
                    found.append(each)
    return found


@pytest.mark.parametrize("num_bytes", [0, 32 << 20])
async def test_closing_ends_all_that_waits_for_an_absent_server(
    own_nats: ServerProcess, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    publishers = Newborn(Publisher)
    transport = NatsTransport(own_nats.url, liveness_s=LIVENESS_S)
    async with transport.serve("w", Endless().answer) as address:
        running = transport.call(address, a_request())
        await anext(running)
        (publisher,) = publishers.all()
        assert isinstance(publisher, Publisher)
        own_nats.freeze()
        for is_away in (False, True):
            for _ in range(0, num_bytes, 1 << 20):
                publisher.put("subject", bytes(1 << 20), "")
            if not is_away:
                with pytest.raises(BrokerLost):
                    await anext(running)
                assert publisher.writable.is_set()  # what waited is forgotten
    await transport.close()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, limit_s=10)
    own_nats.thaw()
    await until(lambda: not connections_to(own_nats.url))
    assert "publish_failed" not in caplog.text


async def test_one_who_stops_waiting_for_the_connection_stops_no_other(nats_server: str) -> None:
    transport = NatsTransport(f"{nats_server} , {nats_server} ")
    first, second = (asyncio.create_task(transport.reachable()) for _ in range(2))
    await asyncio.sleep(0)  # both have begun
    first.cancel()
    await second
    await transport.close()


async def test_a_connection_that_fails_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.nats.CONNECT_TIMEOUT_S", 0.1)
    has_ended = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        has_ended.set()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    transport = NatsTransport(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(BrokerLost):
        await tokens(transport.call("nats://baton.v1.worker.w.1", a_request()))
    async with asyncio.timeout(scaled(10)):
        await has_ended.wait()
    await transport.close()
    server.close()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1/w", "nats://baton.v1.caller.1234#k", "nats://$SYS.x#k"]
)
def test_nothing_is_published_to_what_is_no_worker(nats_server: str, address: str) -> None:
    async def scenario(caller: Transport, _: Transport) -> None:
        with pytest.raises(WorkerLost, match="is not a NATS worker address"):
            await tokens(caller.call(address, a_request()))

    Plane("nats-asyncio", nats_server).run(scenario)
