"""The Transport contract, for both planes: addresses, first calls that come together, and an early close."""

import asyncio

import pytest

from baton.nats import NatsTransport
from baton.streams import CallerLink
from baton.transport import Transport
from tests.alive import Newborn
from tests.planes import Plane, a_request, count_up, tokens
from tests.waiting import PATIENCE_S, until


@pytest.fixture(params=["tcp", "nats"])
def plane(request: pytest.FixtureRequest, nats_server: str) -> Plane:
    return Plane(request.param, nats_server)


async def test_each_address_is_new_and_its_secret_cannot_be_guessed(worker: Transport) -> None:
    names, secrets = set(), set()
    for _attempt in range(3):
        async with worker.serve("w", count_up) as address:
            place, _hash, key = address.partition("#")
            name, _dot, token = place.rpartition(".")
            assert name.endswith("w")
            names.add(token)
            secrets.add(key or token)
    assert len(names) == len(secrets) == 3
    assert all(len(bytes.fromhex(each)) >= 16 for each in secrets)


async def test_first_calls_that_come_together_share_a_link(caller: Transport, worker: Transport) -> None:
    links = Newborn(CallerLink)
    async with worker.serve("w", count_up) as address:
        calls = (tokens(caller.call(address, a_request(2))) for _ in range(5))
        assert await asyncio.gather(*calls) == [[0, 1]] * 5
        assert links.count() == 1


async def test_a_transport_that_is_closed_before_its_worker_leaves_lets_it_leave(
    caller: Transport, worker: Transport
) -> None:
    async with worker.serve("w", count_up) as address:
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        await worker.close()


async def test_a_closed_nats_transport_connects_no_more(nats_server: str) -> None:
    for is_used in (False, True):
        transport = NatsTransport(nats_server)
        if is_used:
            await transport.reachable()
        await transport.close()
        async with asyncio.timeout(PATIENCE_S):
            await transport.reachable()  # nothing to wait for
            with pytest.raises(ConnectionError, match="closed its transport"):
                await transport.serve("w", count_up).__aenter__()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_transport_may_be_closed_while_it_connects_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.nats.CONNECT_TIMEOUT_S", 0.1)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    transport = NatsTransport(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    waiting = asyncio.create_task(transport.reachable())
    await asyncio.sleep(0)  # it connects now
    await transport.close()
    await waiting
    server.close()
