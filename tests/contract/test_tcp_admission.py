"""The TCP plane with more connections than it admits: who keeps a place, who makes room."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import msgspec
import pytest

from baton import frames
from baton.tcp import TcpTransport
from tests.certificates import shared_peer
from tests.planes import Endless, a_request, count_up, tokens
from tests.waiting import PATIENCE_S, until

NUM_ADMITTED = 32


@contextlib.contextmanager
def few_descriptors() -> Iterator[None]:
    """A listener that is made in this block admits NUM_ADMITTED connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * NUM_ADMITTED, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def raw_connection(address: str) -> AsyncIterator[asyncio.StreamWriter]:
    host, _, port = urlsplit(address).netloc.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        yield writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_caller_that_said_hello_keeps_its_place() -> None:
    caller, worker, endless = TcpTransport(), TcpTransport(), Endless()
    with few_descriptors():
        serving = worker.serve("w", endless.answer)
        address = await serving.__aenter__()
    running = caller.call(address, a_request())
    await anext(running)
    async with contextlib.AsyncExitStack() as strangers:
        for _ in range(2 * NUM_ADMITTED):
            await strangers.enter_async_context(raw_connection(address))
    assert not endless.closed.is_set()
    await running.aclose()
    await until(endless.closed.is_set)
    await serving.__aexit__(None, None, None)
    await caller.close()
    await worker.close()


@pytest.mark.usefixtures("shared_authority")
async def test_connections_that_do_not_shake_hands_make_room() -> None:
    caller, worker = TcpTransport(tls=shared_peer()), TcpTransport(tls=shared_peer())
    with few_descriptors():
        serving = worker.serve("w", count_up)
        address = await serving.__aenter__()
    loop, place = asyncio.get_running_loop(), urlsplit(address)
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.ExitStack() as opened:
            silent = [
                opened.enter_context(socket.create_connection((place.hostname, place.port)))
                for _ in range(NUM_ADMITTED)
            ]
            for sock in silent:
                sock.setblocking(False)
            assert await tokens(caller.call(address, a_request(2))) == [0, 1]
            assert await loop.sock_recv(silent[0], 1) == b""
            with pytest.raises(BlockingIOError):
                silent[-1].recv(1)
            await serving.__aexit__(None, None, None)
            assert await loop.sock_recv(silent[-1], 1) == b""
    await caller.close()
    await worker.close()


async def test_a_caller_that_left_frees_its_place() -> None:
    caller, worker = TcpTransport(), TcpTransport()
    with few_descriptors():
        serving = worker.serve("w", count_up)
        address = await serving.__aenter__()
    hello = frames.with_length(
        msgspec.msgpack.encode((0, [frames.Hello(frames.VERSION, address.rpartition("/")[2])]))
    )
    for _ in range(2 * NUM_ADMITTED):
        async with raw_connection(address) as writer:
            writer.write(hello)
    async with asyncio.timeout(PATIENCE_S):
        assert await tokens(caller.call(address, a_request(2))) == [0, 1]
    await serving.__aexit__(None, None, None)
    await caller.close()
    await worker.close()
