"""The NATS plane's connection: subscriptions, forgotten links, an absent server, a slow one."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from baton.errors import BrokerLost, WorkerLost
from baton.messages import Reply, Request, TokenChunk
from baton.nats import NatsTransport
from baton.transport import Transport
from tests.conftest import LaunchServer, ServerProcess, free_port
from tests.planes import Endless, Plane, a_request, count_up, tokens
from tests.waiting import scaled, until

# For tests whose server stands still, which is not to be noticed.
PATIENT: dict[str, Any] = {"liveness_s": scaled(600.0), "ping_interval": 600}


@pytest.fixture
def own_nats(launch_nats: LaunchServer) -> ServerProcess:
    """A NATS server that the test may kill."""
    return launch_nats()


async def test_a_server_that_starts_later_is_found(launch_nats: LaunchServer) -> None:
    url = f"nats://127.0.0.1:{(port := free_port())}"
    caller, worker = NatsTransport(url), NatsTransport(url)
    with pytest.raises(BrokerLost):
        await tokens(caller.call("nats://baton.v1.worker.w.1", a_request()))
    reached = asyncio.create_task(caller.reachable())
    await asyncio.to_thread(launch_nats, "-p", str(port))
    await reached
    async with worker.serve("w", count_up) as address:
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
    await caller.close()
    await worker.close()


def test_a_worker_without_a_server_closes_its_generators_at_once(own_nats: ServerProcess) -> None:
    async def scenario(caller: Transport, worker: Transport) -> None:
        endless = Endless()
        async with worker.serve("w", endless.answer) as address:
            running = caller.call(address, a_request())
            await anext(running)
            own_nats.kill()
            await until(endless.closed.is_set, limit_s=5)  # not after the liveness limit
            await running.aclose()

    Plane("nats-asyncio", own_nats.url).run(scenario, **PATIENT)


@contextlib.asynccontextmanager
async def relayed(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of a relay to this server, and an event after which it takes nothing more on its connections;
    new ones work.
    """
    is_cut, is_over = asyncio.Event(), asyncio.Event()
    serving: set[asyncio.Task[None] | None] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_new: bool) -> None:
        while (is_new or not is_cut.is_set()) and (data := await reader.read(4096)):
            writer.write(data)
            await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        is_new = is_cut.is_set()
        there = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        ways = ((reader, there[1]), (there[0], writer))
        copying = [asyncio.ensure_future(pass_on(*way, is_new=is_new)) for way in ways]
        await is_over.wait()
        for (_, to), task in zip(ways, copying, strict=True):
            to.close()
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", limit=4096)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", is_cut
    finally:
        server.close()
        is_over.set()
        await asyncio.gather(*filter(None, serving))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_process_that_is_cut_off_with_unsent_data_connects_again(nats_server: str, loop: str) -> None:
    async def flood(_: Request) -> AsyncGenerator[Reply, None]:
        while True:
            yield TokenChunk(token_ids=(1,) * 100_000)
            await asyncio.sleep(0)  # let other tasks run

    async def scenario(caller: Transport, _: Transport) -> None:
        async with relayed(nats_server) as (url, is_cut):
            worker = NatsTransport(url)
            async with worker.serve("w", lambda r: count_up(r) if r == a_request() else flood(r)) as address:
                running = caller.call(address, a_request(2))
                await anext(running)
                is_cut.set()
                with pytest.raises(WorkerLost):
                    await tokens(running)
                async with asyncio.timeout(scaled(15)):
                    await eventually(lambda: tokens(caller.call(address, a_request())))
            await worker.close()

    Plane(f"nats-{loop}", nats_server).run(scenario)


def test_an_idle_process_that_is_cut_off_connects_again(nats_server: str) -> None:
    async def scenario(caller: Transport, _: Transport) -> None:
        async with relayed(nats_server) as (url, is_cut):
            worker = NatsTransport(url)
            async with worker.serve("w", count_up) as address:
                is_cut.set()
                with contextlib.suppress(WorkerLost):
                    while True:  # until what the relay had begun to read is through
                        await tokens(caller.call(address, a_request()))
                async with asyncio.timeout(scaled(15)):
                    await eventually(lambda: tokens(caller.call(address, a_request())))
            await worker.close()

    Plane("nats-asyncio", nats_server).run(scenario, liveness_s=scaled(1.0))


async def eventually(attempt: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await attempt()
        except WorkerLost:
            await asyncio.sleep(0.1)  # its subject has no subscriber yet
        else:
            return


def test_generators_wait_while_the_server_takes_nothing(own_nats: ServerProcess) -> None:
    num_made = 0
    may_go_on = asyncio.Event()

    async def flood(_: Request) -> AsyncGenerator[Reply, None]:
        nonlocal num_made
        yield TokenChunk(token_ids=(0,))
        await may_go_on.wait()
        while num_made < 200:  # within the caller's window
            num_made += 1
            yield TokenChunk(token_ids=(1,) * 100_000)
            await asyncio.sleep(0)  # let other tasks run

    async def scenario(caller: Transport, worker: Transport) -> None:
        async with worker.serve("w", flood) as address:
            running = caller.call(address, a_request())
            await anext(running)
            own_nats.freeze()
            may_go_on.set()
            num_before = 0
            while num_before != num_made or not num_made:
                num_before = num_made
                await asyncio.sleep(0.2)  # a message that does not come has no event
            own_nats.thaw()
            assert num_before < 150
            assert len(await tokens(running)) == 200 * 100_000

    Plane("nats-asyncio", own_nats.url).run(scenario, **PATIENT)
