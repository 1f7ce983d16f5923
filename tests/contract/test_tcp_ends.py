"""The TCP plane's connections: how they end, when none can be made, and what is left of them."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncGenerator, Iterator
from urllib.parse import urlsplit

import msgspec
import pytest

from baton import frames
from baton.errors import WorkerLost
from baton.messages import Reply, Request, TokenChunk
from baton.peer_tls import PeerDistrusted
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from tests.clock import jumping
from tests.contract.test_tcp import deaf_port, now_s, transports
from tests.contract.test_tcp_admission import NUM_ADMITTED, few_descriptors, raw_connection
from tests.planes import a_request, count_up, tokens
from tests.waiting import PATIENCE_S, until


def hello(address: str) -> bytes:
    name = address.rpartition("/")[2]
    return frames.with_length(msgspec.msgpack.encode((0, [frames.Hello(frames.VERSION, name)])))


@jumping
async def test_a_worker_that_takes_no_connection_is_lost_after_three_seconds() -> None:
    with deaf_port() as port:
        caller = TcpTransport(liveness_s=60)
        with pytest.raises(WorkerLost, match=r"did not accept the connection within 3\.0 s"):
            await tokens(caller.call(f"tcp://127.0.0.1:{port}/w", a_request()))
        assert now_s() == pytest.approx(3, abs=0.3)
        await caller.close()


async def test_a_worker_that_stops_takes_no_new_connection() -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()

    async def answer(_: Request) -> AsyncGenerator[Reply, None]:
        try:
            yield TokenChunk(token_ids=(1,))
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()

    async with transports() as (caller, worker), contextlib.AsyncExitStack() as context:
        address = await context.enter_async_context(worker.serve("w", answer))
        await anext(caller.call(address, a_request()))
        leaving = asyncio.ensure_future(context.aclose())
        await closing.wait()
        with pytest.raises(ConnectionRefusedError):
            async with raw_connection(address):
                pass
        may_close.set()
        await leaving


async def test_a_link_that_is_lost_before_it_is_connected_hangs_up() -> None:
    received = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read())
        writer.close()

    async with transports(1) as (caller,), await asyncio.start_server(listen, "127.0.0.1") as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}/w.1"
        calling = asyncio.ensure_future(tokens(caller.call(address, a_request())))
        await asyncio.sleep(0)  # it connects now
        caller.lose(address, "its engine hangs")
        with pytest.raises(WorkerLost, match="its engine hangs"):
            await calling
        async with asyncio.timeout(PATIENCE_S):
            assert b"its engine hangs" in await received


async def test_a_port_that_hangs_up_is_a_lost_worker_and_no_question_of_trust() -> None:
    async with (
        transports(1) as (caller,),
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as server,
    ):
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}/w.1"
        with pytest.raises(WorkerLost, match="the connection") as lost:
            await tokens(caller.call(address, a_request()))
        assert not isinstance(lost.value, PeerDistrusted)


async def test_a_known_caller_that_sends_too_much_is_lost_and_no_stranger() -> None:
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        num_before = unauthenticated.num_messages
        place = urlsplit(address)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(hello(address))
        assert await reader.readexactly(1)
        writer.write((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert b"exceeds the limit" in await reader.read()
        assert unauthenticated.num_messages == num_before
        writer.close()


async def test_one_more_than_all_places_is_disconnected_while_callers_have_them() -> None:
    async with transports(1) as (worker,), contextlib.AsyncExitStack() as context:
        with few_descriptors():
            address = await context.enter_async_context(worker.serve("w", count_up))
        place = urlsplit(address)
        for _ in range(NUM_ADMITTED):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            context.callback(writer.close)
            writer.write(hello(address))
            assert await reader.readexactly(1)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        context.callback(writer.close)
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionResetError):
                writer.write(hello(address))
                assert await reader.read() == b""


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_a_stranger_makes_room_for_a_caller() -> None:
    loop = asyncio.get_running_loop()
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        place = urlsplit(address)
        assert place.port
        num_before = len(os.listdir("/proc/self/fd"))
        with socket.create_connection(("127.0.0.1", place.port)) as stranger, socket.socket() as caller:
            await until(lambda: len(os.listdir("/proc/self/fd")) == num_before + 3)  # it is accepted
            stranger.setblocking(False)
            caller.setblocking(False)
            with no_more_descriptors():
                await loop.sock_connect(caller, ("127.0.0.1", place.port))
                await loop.sock_sendall(caller, hello(address))
                async with asyncio.timeout(PATIENCE_S):
                    assert await loop.sock_recv(caller, 1)
                    assert b"others are waiting" in await loop.sock_recv(stranger, 1000)
