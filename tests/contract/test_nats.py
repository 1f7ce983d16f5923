"""The NATS plane's connection: subscriptions, forgotten links, an absent server, a slow one."""

import asyncio
from collections.abc import AsyncGenerator

import nats
import nats.errors
import pytest

from baton.errors import BrokerLost
from baton.messages import Reply, Request, TokenChunk
from baton.nats import NatsTransport
from baton.streams import CallerLink
from baton.transport import Transport
from tests.alive import Newborn
from tests.conftest import LaunchServer, ServerProcess, free_port
from tests.planes import Endless, Plane, a_request, count_up, tokens
from tests.waiting import PATIENCE_S, scaled, until


@pytest.fixture
def own_nats(launch_nats: LaunchServer) -> ServerProcess:
    """A NATS server that the test may kill."""
    return launch_nats()


def test_a_worker_that_left_has_no_subscription(nats_server: str) -> None:
    async def scenario(caller: Transport, worker: Transport) -> None:
        async with worker.serve("w", count_up) as address:
            assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        client = await nats.connect(nats_server)
        try:
            with pytest.raises(nats.errors.NoRespondersError):
                await client.request(
                    f"{address.removeprefix('nats://').partition('#')[0]}.token", timeout=PATIENCE_S
                )
        finally:
            await client.close()

    Plane("nats-asyncio", nats_server).run(scenario)


def test_idle_links_are_forgotten(nats_server: str) -> None:
    links = Newborn(CallerLink)

    async def scenario(caller: Transport, worker: Transport) -> None:
        async with worker.serve("w", count_up) as address:
            assert await tokens(caller.call(address, a_request(2))) == [0, 1]
            await until(lambda: not links.count(), pause_s=0.05)

    Plane("nats-asyncio", nats_server).run(scenario, liveness_s=scaled(1.0))


def test_a_server_that_starts_later_is_found(launch_nats: LaunchServer) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_worker_without_a_server_closes_its_generators_at_once(own_nats: ServerProcess) -> None:
    async def scenario(caller: Transport, worker: Transport) -> None:
        endless = Endless()
        async with worker.serve("w", endless.answer) as address:
            running = caller.call(address, a_request())
            await anext(running)
            own_nats.kill()
            await until(endless.closed.is_set, limit_s=5)  # not after the liveness limit
            await running.aclose()

    Plane("nats-asyncio", own_nats.url).run(scenario, liveness_s=scaled(600.0))


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

    Plane("nats-asyncio", own_nats.url).run(scenario, liveness_s=scaled(600.0))
