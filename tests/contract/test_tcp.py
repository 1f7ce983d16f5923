"""The TCP plane's connections: time limits, how they end, and more of them than it admits."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import msgspec
import pytest

from baton import frames
from baton.errors import WorkerLost
from baton.messages import Reply, Request
from baton.peer_tls import PeerDistrusted
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from tests.certificates import shared_peer
from tests.clock import jumping, now_s
from tests.planes import Endless, Stream, a_request, count_up, flood, tokens
from tests.waiting import PATIENCE_S, until

NUM_ADMITTED = 32


@contextlib.asynccontextmanager
async def transports(num: int = 2) -> AsyncIterator[list[TcpTransport]]:
    made = [TcpTransport() for _ in range(num)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def first_frame(address: str, *signals: frames.Signal) -> bytes:
    """The Hello of a caller of this worker, and more."""
    hello = frames.Hello(frames.VERSION, address.rpartition("/")[2])
    return frames.with_length(msgspec.msgpack.encode((0, [hello, *signals])))


def place_of(address: str) -> tuple[str, int]:
    host, _, port = urlsplit(address).netloc.partition(":")
    return host, int(port)


@contextlib.asynccontextmanager
async def raw_connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*place_of(address))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.contextmanager
def descriptors(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def crowded(worker: TcpTransport, answer: Callable[[Request], Stream]) -> AsyncIterator[str]:
    """The address of a worker that admits NUM_ADMITTED connections."""
    async with asyncio.timeout(PATIENCE_S), contextlib.AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # earlier tests may have left more open
            patch.setattr("baton.listener.resource.getrlimit", lambda _: (4 * NUM_ADMITTED,) * 2)
            address = await stack.enter_async_context(worker.serve("w", answer))
        yield address


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


@pytest.mark.parametrize(
    ("liveness_s", "message", "lost_s"),
    [(2.0, "does not respond", 2), (60.0, r"did not accept the connection within 3\.0 s", 3)],
)
@jumping
async def test_a_worker_that_takes_no_connection_is_lost_soon(
    liveness_s: float, message: str, lost_s: int
) -> None:
    with deaf_port() as port:
        caller = TcpTransport(liveness_s=liveness_s)
        with pytest.raises(WorkerLost, match=message):
            await tokens(caller.call(f"tcp://127.0.0.1:{port}/w", a_request()))
        assert now_s() == pytest.approx(lost_s, abs=0.3)
        await caller.close()


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
async def test_a_peer_that_does_not_read_is_hung_up_on_after_a_second() -> None:
    async with transports(1) as (worker,):
        async with worker.serve("w", flood) as address:
            peer = socket.create_connection(place_of(address))
            opens = [frames.Open(number, a_request()) for number in range(20)]
            peer.sendall(first_frame(address))
            peer.sendall(frames.with_length(msgspec.msgpack.encode((1, opens))))
            await asyncio.sleep(5)  # virtual time
            began_s = now_s()
        assert now_s() - began_s == pytest.approx(1, abs=0.2)
        peer.close()


async def test_a_worker_that_stops_takes_no_new_connection() -> None:
    endless = Endless()
    endless.may_close.clear()
    async with transports() as (caller, worker), contextlib.AsyncExitStack() as context:
        address = await context.enter_async_context(worker.serve("w", endless.answer))
        await anext(caller.call(address, a_request()))
        leaving = asyncio.ensure_future(context.aclose())
        await endless.closed.wait()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*place_of(address))
        endless.may_close.set()
        await leaving


@pytest.mark.parametrize(("says", "reason"), [(b"", "the connection"), (b"\xff" * 64, "exceeds the limit")])
async def test_a_port_that_hangs_up_or_sends_nonsense_is_a_lost_worker_and_no_question_of_trust(
    says: bytes, reason: str
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    num_before = unauthenticated.num_messages
    async with transports(1) as (caller,), await asyncio.start_server(answer, "127.0.0.1") as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}/w.1"
        with pytest.raises(WorkerLost, match=reason) as lost:
            await tokens(caller.call(address, a_request()))
        assert not isinstance(lost.value, PeerDistrusted)
    assert unauthenticated.num_messages == num_before


async def test_a_known_caller_that_sends_too_much_is_lost_and_not_unknown() -> None:
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        num_before = unauthenticated.num_messages
        async with raw_connection(address) as (reader, writer):
            writer.write(first_frame(address))
            assert await reader.readexactly(1)
            writer.write((frames.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
            assert b"exceeds the limit" in await reader.read()
        assert unauthenticated.num_messages == num_before


async def test_one_more_than_all_places_is_disconnected_while_callers_have_them() -> None:
    async with (
        transports(1) as (worker,),
        crowded(worker, count_up) as address,
        contextlib.AsyncExitStack() as callers,
    ):
        for _ in range(NUM_ADMITTED):
            reader, writer = await callers.enter_async_context(raw_connection(address))
            writer.write(first_frame(address))
            assert await reader.readexactly(1)
        reader, writer = await callers.enter_async_context(raw_connection(address))
        with contextlib.suppress(ConnectionResetError):
            writer.write(first_frame(address))
            assert await reader.read() == b""


async def test_a_caller_that_sent_hello_keeps_its_place() -> None:
    endless = Endless()
    async with transports() as (caller, worker), crowded(worker, endless.answer) as address:
        running = caller.call(address, a_request())
        await anext(running)
        async with contextlib.AsyncExitStack() as connections:
            for _ in range(2 * NUM_ADMITTED):
                await connections.enter_async_context(raw_connection(address))
        assert not endless.closed.is_set()
        await running.aclose()
        await until(endless.closed.is_set)


@pytest.mark.usefixtures("shared_authority")
async def test_connections_that_do_not_shake_hands_make_room() -> None:
    caller, worker = TcpTransport(tls=shared_peer()), TcpTransport(tls=shared_peer())
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        async with crowded(worker, count_up) as address:
            silent = [
                opened.enter_context(socket.create_connection(place_of(address))) for _ in range(NUM_ADMITTED)
            ]
            for sock in silent:
                sock.setblocking(False)
            assert await tokens(caller.call(address, a_request(2))) == [0, 1]
            assert await loop.sock_recv(silent[0], 1) == b""
            with pytest.raises(BlockingIOError):
                silent[-1].recv(1)
        assert await loop.sock_recv(silent[-1], 1) == b""
    await caller.close()
    await worker.close()


async def test_a_caller_that_left_frees_its_place() -> None:
    async with transports() as (caller, worker), crowded(worker, count_up) as address:
        for _ in range(2 * NUM_ADMITTED):
            async with raw_connection(address) as (_, writer):
                writer.write(first_frame(address))
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]


def lowest_free() -> int:
    """The next descriptor's number."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    return lowest


async def test_without_descriptors_an_unknown_caller_makes_room_for_a_caller() -> None:
    loop = asyncio.get_running_loop()
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        num_before = len(os.listdir("/proc/self/fd"))
        with socket.create_connection(place_of(address)) as unknown, socket.socket() as caller:
            await until(lambda: len(os.listdir("/proc/self/fd")) == num_before + 3)  # it is accepted
            unknown.setblocking(False)
            caller.setblocking(False)
            with descriptors(lowest_free()):
                await loop.sock_connect(caller, place_of(address))
                await loop.sock_sendall(caller, first_frame(address))
                async with asyncio.timeout(PATIENCE_S):
                    assert await loop.sock_recv(caller, 1)
                    assert b"others are waiting" in await loop.sock_recv(unknown, 1000)


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", (frames.MAX_HELLO_BYTES + 1).to_bytes(4, "big")],
    ids=["http", "frame", "long hello"],
)
async def test_a_worker_hangs_up_on_noise_and_serves_on(noise: bytes) -> None:
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        num_before = unauthenticated.num_messages
        async with raw_connection(address) as (reader, writer), asyncio.timeout(PATIENCE_S):
            writer.write(noise)
            await reader.read()  # it has closed the connection
        assert unauthenticated.num_messages == num_before + 1
        long = a_request(2, token_ids=[1] * 100_000)
        assert await tokens(worker.call(address, long)) == [0, 1]


@pytest.mark.parametrize(
    ("version", "reason"), [(frames.VERSION, b"another name"), (frames.VERSION + 1, b"protocol version")]
)
async def test_a_caller_without_the_workers_name_does_not_learn_it(version: int, reason: bytes) -> None:
    async with transports(1) as (worker,), worker.serve("w", count_up) as address:
        secret = address.rpartition(".")[2]
        num_before = unauthenticated.num_messages
        async with raw_connection(address) as (reader, writer), asyncio.timeout(PATIENCE_S):
            hello = msgspec.msgpack.encode((0, [frames.Hello(version, "w.guess")]))
            writer.write(frames.with_length(hello))
            answer = await reader.read()
        assert unauthenticated.num_messages == num_before + 1
        assert secret.encode() not in answer
        assert reason in answer


async def test_a_silent_caller_gets_nothing() -> None:
    worker = TcpTransport(liveness_s=1.0)
    async with worker.serve("w", count_up) as address:
        async with raw_connection(address) as (reader, _):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 1.0)  # several heartbeats long
        assert await tokens(worker.call(address, a_request(2))) == [0, 1]
    await worker.close()


async def test_a_peer_that_does_not_read_fills_no_memory() -> None:
    num_made_bytes = 0

    async def counted(request: Request) -> AsyncGenerator[Reply, None]:
        nonlocal num_made_bytes
        async for chunk in flood(request):
            num_made_bytes += 100_000
            yield chunk

    async with transports(1) as (worker,), worker.serve("w", counted) as address:
        opens = [frames.Open(number, a_request()) for number in range(20)]
        credits_ = [frames.Credit(number, 1_000_000) for number in range(20)]
        async with raw_connection(address) as (_, writer):
            writer.write(first_frame(address))
            writer.write(frames.with_length(msgspec.msgpack.encode((1, [*opens, *credits_]))))
            num_before = -1
            while num_before != num_made_bytes:
                num_before = num_made_bytes
                await asyncio.sleep(0.2)  # a message that does not come has no event
        assert 0 < num_made_bytes < 64 * 1024 * 1024
