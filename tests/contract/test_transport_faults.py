"""Both request planes with real processes that are killed, frozen and restarted, and with broken peers."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.errors import BrokerLost, WorkerLost
from baton.messages import Reply, Request, TokenChunk
from baton.nats import ANSWER_S, NatsTransport
from baton.tcp import TcpTransport
from baton.transport import Transport
from tests.certificates import Authority
from tests.conftest import ServerProcess, free_port
from tests.planes import Endless, Plane, a_request, count_up, eventually, tokens
from tests.tcp_balancer import TcpBalancer
from tests.waiting import FAILOVER_S, PATIENCE_S, scaled, signal_process

SOON_S = FAILOVER_S
LIVENESS_S = scaled(1.0)
SHORT_LIVENESS_S = scaled(0.2)
CALLER_LIVENESS_S = scaled(2.0)
both_loops = pytest.mark.loops("uvloop", "asyncio")


@pytest.fixture(params=["tcp", "tls", "nats"])
def plane(request: pytest.FixtureRequest, nats_server: str, shared_authority: Authority) -> Plane:
    return Plane(request.param, nats_server)


class Peer:
    """A child process on the same plane; see tests/plane_peer.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    def signal(self, number: signal.Signals) -> None:
        signal_process(self._process.pid, number)


@contextlib.asynccontextmanager
async def peer(plane: Plane, *address: str, liveness_s: float = 10.0) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.plane_peer", plane.kind, plane.nats_url, str(liveness_s), *address),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@both_loops
async def test_a_killed_worker_is_noticed_at_once(plane: Plane, caller: Transport) -> None:
    async with peer(plane) as worker:
        address = await worker.says()
        running = [caller.call(address, a_request()) for _ in range(3)]
        for call in running:
            await anext(call)
        worker.signal(signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            for call in running:
                with pytest.raises(WorkerLost):
                    await anext(call)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(WorkerLost):
                await anext(caller.call(address, a_request()))


@both_loops
async def test_a_frozen_worker_is_lost_after_the_liveness_limit_and_welcome_again(plane: Plane) -> None:
    async with plane.ends(liveness_s=LIVENESS_S) as (caller, _), peer(plane) as worker:
        address = await worker.says()
        call = caller.call(address, a_request())
        await anext(call)
        worker.signal(signal.SIGSTOP)
        start_s = time.monotonic()
        async with asyncio.timeout(LIVENESS_S + SOON_S):
            with pytest.raises(WorkerLost, match="does not respond"):
                await anext(call)
        assert time.monotonic() - start_s > LIVENESS_S / 2
        worker.signal(signal.SIGCONT)
        call = caller.call(address, a_request())
        async with asyncio.timeout(SOON_S):
            await anext(call)
        await call.aclose()


@both_loops
async def test_a_killed_caller_frees_its_generators_at_once(plane: Plane, worker: Transport) -> None:
    endless = Endless()
    async with worker.serve("w", endless.answer) as address, peer(plane, address) as caller:
        assert "TokenChunk" in await caller.says()
        caller.signal(signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            await endless.closed.wait()


@both_loops
async def test_a_frozen_caller_frees_its_generators_after_the_liveness_limit(plane: Plane) -> None:
    async with plane.ends(liveness_s=CALLER_LIVENESS_S / 5) as (_, worker):
        endless = Endless()
        async with worker.serve("w", endless.answer) as address, peer(plane, address) as caller:
            assert "TokenChunk" in await caller.says()
            caller.signal(signal.SIGSTOP)
            async with asyncio.timeout(CALLER_LIVENESS_S + SOON_S):
                await endless.closed.wait()


@both_loops
async def test_a_long_silence_of_the_engine_is_no_fault(plane: Plane) -> None:
    async with plane.ends(liveness_s=SHORT_LIVENESS_S) as (caller, worker):

        async def answer(_: Request) -> AsyncGenerator[Reply, None]:
            await asyncio.sleep(3 * SHORT_LIVENESS_S)  # silent for three times the liveness limit
            yield TokenChunk(token_ids=(1,))

        async with worker.serve("w", answer) as address:
            assert await tokens(caller.call(address, a_request())) == [1]


@both_loops
async def test_a_caller_that_closes_ends_its_calls_and_the_workers_generators(
    caller: Transport, worker: Transport
) -> None:
    endless = Endless()
    async with worker.serve("w", endless.answer) as address:
        running = caller.call(address, a_request())
        await anext(running)
        waiting = asyncio.ensure_future(anext(running))
        await asyncio.sleep(0)  # `anext` waits now
        async with asyncio.timeout(SOON_S):
            await caller.close()
            with pytest.raises(WorkerLost):
                await waiting
            await endless.closed.wait()
        with pytest.raises(WorkerLost):
            await anext(caller.call(address, a_request()))


@pytest.mark.parametrize("harm", [ServerProcess.kill, ServerProcess.freeze])
async def test_calls_fail_while_nats_is_away_and_work_when_it_is_back(
    own_nats: ServerProcess, harm: Callable[[ServerProcess], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton")
    async with Plane("nats", own_nats.url).ends(liveness_s=LIVENESS_S) as (caller, worker):
        endless = Endless()

        async def answer(request: Request) -> AsyncGenerator[Reply, None]:
            async for reply in count_up(request) if request == a_request(2) else endless.answer(request):
                yield reply

        async with worker.serve("w", answer) as address:
            running = caller.call(address, a_request())
            await anext(running)
            harm(own_nats)
            async with asyncio.timeout(LIVENESS_S + ANSWER_S + SOON_S):
                with pytest.raises(BrokerLost):
                    await anext(running)
            async with asyncio.timeout(5 * LIVENESS_S + SOON_S):
                await endless.closed.wait()
            async with asyncio.timeout(LIVENESS_S + SOON_S):
                with pytest.raises(BrokerLost):
                    await anext(caller.call(address, a_request()))
            await asyncio.to_thread(own_nats.thaw if harm is ServerProcess.freeze else own_nats.start)
            async with asyncio.timeout(SOON_S):
                await caller.reachable()
            assert await eventually(lambda: caller.call(address, a_request(2))) == [0, 1]
            await worker.reachable()  # it may have noticed the outage late
    num_outages = caplog.text.count("plane=unreachable")
    assert num_outages in {1, 2}  # the caller's; the worker may not have noticed one that was short
    assert caplog.text.count("plane=reachable") == num_outages
    errors = [each for each in caplog.records if each.message.startswith("nats_error")]
    assert not [each for each in errors if each.levelno > logging.DEBUG]


async def test_without_a_nats_server_calls_and_workers_fail_within_the_connect_timeout() -> None:
    transport = NatsTransport(f"nats://user:secret@127.0.0.1:{free_port()}")
    async with asyncio.timeout(FAILOVER_S):
        calls = [tokens(transport.call("nats://baton.v1.worker.w.1", a_request())) for _ in range(9)]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(ConnectionError):
            await transport.serve("w", count_up).__aenter__()
        await transport.close()
    assert all(isinstance(failure, BrokerLost) for failure in failures)
    assert "no NATS server at 127.0.0.1" in str(failures[0])
    assert "secret" not in str(failures)


async def test_a_worker_that_is_cut_off_is_lost_and_keeps_its_caller_longer() -> None:
    endless = Endless()
    caller, worker = TcpTransport(), TcpTransport()  # with the default liveness
    async with worker.serve("w", endless.answer) as address:
        relay = TcpBalancer(port := urlsplit(address).port or 0)
        async with relay.listening() as own_port:
            call = caller.call(address.replace(f":{port}/", f":{own_port}/"), a_request())
            await anext(call)
            relay.cut()
            async with asyncio.timeout(FAILOVER_S):
                with pytest.raises(WorkerLost, match="does not respond"):
                    await anext(call)
            assert not endless.closed.is_set()
            await caller.close()
    await worker.close()
