"""The TCP plane's time limits: connecting, idling, peers that do not read."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

import msgspec
import pytest

from baton import frames
from baton.errors import WorkerLost
from baton.messages import Reply, Request, TokenChunk
from baton.tcp import TcpTransport
from tests.clock import jumping
from tests.planes import a_request, count_up, tokens


def now_s() -> float:
    return asyncio.get_running_loop().time()


@contextlib.asynccontextmanager
async def transports(num: int = 2) -> AsyncIterator[list[TcpTransport]]:
    made = [TcpTransport() for _ in range(num)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


@contextlib.contextmanager
def deaf_port() -> Iterator[int]:
    """A port with a full accept queue, so that the next connection gets no answer."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@jumping
async def test_a_worker_that_takes_no_connection_is_lost_within_the_liveness_limit() -> None:
    with deaf_port() as port:
        async with transports(1) as (caller,):
            with pytest.raises(WorkerLost, match="does not respond"):
                await tokens(caller.call(f"tcp://127.0.0.1:{port}/w", a_request()))
            assert now_s() == pytest.approx(2, abs=0.2)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_a_worker_may_have_an_ipv6_address() -> None:
    async with transports(1) as (caller,):
        worker = TcpTransport(host="::1")
        async with worker.serve("w", count_up) as address:
            assert address.startswith("tcp://[::1]:")
            assert await tokens(caller.call(address, a_request(2))) == [0, 1]
        await worker.close()


@jumping
async def test_closing_does_not_wait_for_a_connection_that_is_being_made() -> None:
    with deaf_port() as port:
        async with transports(1) as (caller,):
            calling = asyncio.create_task(tokens(caller.call(f"tcp://127.0.0.1:{port}/w", a_request())))
            await asyncio.sleep(1)
            await caller.close()
            with pytest.raises(WorkerLost):
                await calling
            assert now_s() == pytest.approx(1, abs=0.2)


@jumping
async def test_a_peer_that_does_not_read_is_hung_up_on_after_a_second() -> None:
    async def flood(_: Request) -> AsyncGenerator[Reply, None]:
        while True:
            yield TokenChunk(token_ids=(1,) * 100_000)
            await asyncio.sleep(0)  # let other tasks run

    async with transports(1) as (worker,):
        async with worker.serve("w", flood) as address:
            place, _, name = address.removeprefix("tcp://").partition("/")
            host, _, port = place.partition(":")
            peer = socket.create_connection((host, int(port)))
            hello = frames.Hello(frames.VERSION, name)
            opens = [frames.Open(number, a_request()) for number in range(20)]
            for number, parts in enumerate(([hello], opens)):
                peer.sendall(frames.with_length(msgspec.msgpack.encode((number, parts))))
            await asyncio.sleep(5)
            began_s = now_s()
        assert now_s() - began_s == pytest.approx(1, abs=0.2)
        peer.close()


@jumping
async def test_a_generator_goes_on_when_its_peer_reads_again() -> None:
    num_made = 0

    async def flood(_: Request) -> AsyncGenerator[Reply, None]:
        nonlocal num_made
        while num_made < 150:
            num_made += 1
            yield TokenChunk(token_ids=(1,) * 100_000)
            await asyncio.sleep(0)  # let other tasks run

    async with transports(1) as (worker,), worker.serve("w", flood) as address:
        place, _, name = address.removeprefix("tcp://").partition("/")
        host, _, port = place.partition(":")
        with socket.create_connection((host, int(port))) as peer:
            hello = frames.Hello(frames.VERSION, name)
            first = msgspec.msgpack.encode((0, [hello, frames.Open(1, a_request())]))
            peer.sendall(frames.with_length(first))
            await asyncio.sleep(5)
            assert num_made < 150
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            while num_made < 150:
                assert await loop.sock_recv(peer, 1 << 20)


@jumping
async def test_an_address_of_another_scheme_is_not_called() -> None:
    async with transports() as (caller, worker), worker.serve("w", count_up) as address:
        with pytest.raises(WorkerLost, match="is not a TCP worker address"):
            await tokens(caller.call(address.replace("tcp", "http"), a_request()))
