"""Pulls step by step: readers that follow the protocol and others that do not, and sources that hang."""

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from baton.errors import HandoffFailed, HandoffStalled
from baton.messages import KvAsk, KvConfirm, KvGrant, KvWithdrawn, Reply, StatsRequest
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from tests.clock import jumping, now_s
from tests.kv_peer import near, pulled
from tests.waiting import until
from workers.kv.memory import Memory, host_memory
from workers.kv.stream import STALL_S, Stream
from workers.kv.transceiver import CacheTransceiver, Ticket

PAYLOAD = bytes(range(256)) * 16
LARGE_BYTES = 8 << 20  # over a socket of its own


class Reader:
    """Calls the source of a ticket, step by step."""

    def __init__(self, ticket: Ticket) -> None:
        self._transport = TcpTransport()
        self._address = ticket.address
        self._words: dict[str, Any] = {
            "offer_id": ticket.offer_id,
            "num_bytes": ticket.num_bytes,
            "secret": ticket.secret,
        }

    def ask(self, **other: Any) -> AbstractAsyncContextManager[AsyncGenerator[Reply, None]]:
        return aclosing(self._transport.call(self._address, KvAsk(**self._words | other)))

    async def confirm(self, **other: Any) -> None:
        async for _ in self._transport.call(self._address, KvConfirm(**self._words | other)):
            raise AssertionError("a confirmation has no reply")

    async def close(self) -> None:
        await self._transport.close()


@asynccontextmanager
async def reading(ticket: Ticket) -> AsyncIterator[Reader]:
    reader = Reader(ticket)
    try:
        yield reader
    finally:
        await reader.close()


def is_moved(source: CacheTransceiver, ticket: Ticket) -> bool:
    offer = source._offers[ticket.offer_id]  # noqa: SLF001  `moved` waits, it does not tell
    return offer.moved.done()


@jumping
async def test_an_offer_has_moved_when_its_reader_confirms_it_and_not_before() -> None:
    async with near("tcp") as source:
        ticket = source.offer(host_memory(bytearray(PAYLOAD)))
        async with reading(ticket) as reader:
            async with reader.ask() as replies:
                grant = await anext(replies)
                assert isinstance(grant, KvGrant)
                assert grant.payload == PAYLOAD
            await asyncio.sleep(1)  # time for what must not happen
            assert not is_moved(source, ticket)
            await reader.confirm(num_bytes=7)
            assert await source.moved(ticket) == 7
            with pytest.raises(HandoffFailed, match="no longer offered"):
                await reader.confirm()


@pytest.mark.parametrize("by_another_reader", [True, False])
async def test_an_offer_that_ends_stops_its_readers_and_their_bytes_do_not_count(
    by_another_reader: bool,
) -> None:
    async with near("tcp") as source, near("tcp") as other:
        ticket = source.offer(host_memory(bytearray(LARGE_BYTES)))
        async with reading(ticket) as reader, reader.ask() as replies:
            assert isinstance(await anext(replies), KvGrant)
            if by_another_reader:
                await pulled(other, ticket)
            else:
                source.withdraw(ticket)
            assert await anext(replies) == KvWithdrawn()
            with pytest.raises(HandoffFailed, match="no longer offered"):
                await reader.confirm()
        with pytest.raises(HandoffFailed, match="no longer offered"):
            await pulled(other, ticket)


@pytest.mark.parametrize(
    ("wrong", "is_strange"),
    [
        ({"offer_id": 99}, False),
        ({"secret": b""}, True),
        ({"secret": bytes(16)}, True),
        ({"num_bytes": 0}, False),
        ({"num_bytes": len(PAYLOAD) + 1}, False),
        ({"is_direct": True}, False),
    ],
)
@jumping
async def test_who_asks_for_what_is_not_offered_gets_nothing(wrong: dict[str, Any], is_strange: bool) -> None:
    num_before = unauthenticated.num_messages
    async with near("tcp") as source:
        ticket = source.offer(host_memory(bytearray(PAYLOAD)))
        async with reading(ticket) as reader:
            async with reader.ask(**wrong) as replies:
                with pytest.raises(HandoffFailed):
                    await anext(replies)
            if "is_direct" not in wrong:
                with pytest.raises(HandoffFailed):
                    await reader.confirm(**wrong)
                assert unauthenticated.num_messages == num_before + 2 * is_strange
            assert not is_moved(source, ticket)


async def test_requests_of_other_kinds_are_refused() -> None:
    async with near("tcp") as source:
        address = source.offer(host_memory(bytearray(1))).address
        transport = TcpTransport()
        with pytest.raises(HandoffFailed):
            await anext(transport.call(address, StatsRequest()))
        await transport.close()


async def test_withdrawn_memory_is_released_when_its_reader_has_closed_the_call() -> None:
    async with near("tcp") as source:
        payload = host_memory(bytearray(PAYLOAD))
        lent = weakref.ref(payload)
        ticket = source.offer(payload)
        del payload
        async with reading(ticket) as reader:
            async with reader.ask() as replies:
                await anext(replies)
                source.withdraw(ticket)
                assert await anext(replies) == KvWithdrawn()
                await asyncio.sleep(1)  # time for what must not happen
                assert lent() is not None
            await until(lambda: gc.collect() >= 0 and lent() is None)


@pytest.mark.loops("asyncio", "uvloop")
async def test_only_who_shows_the_token_gets_bytes_from_the_socket_and_only_while_they_are_lent() -> None:
    num_before, loop = unauthenticated.num_messages, asyncio.get_running_loop()
    road, payload = Stream("127.0.0.1"), host_memory(bytearray(b"x" * LARGE_BYTES))
    with socket.socket() as mute, socket.socket() as guessing:
        async with road.lend(payload) as way:
            for sock in (mute, guessing):
                sock.connect(("127.0.0.1", way.port))
                sock.setblocking(False)
            await loop.sock_sendall(guessing, bytes(16))
            assert await loop.sock_recv(guessing, 1) == b""
            await road.fetch("tcp://127.0.0.1", way, host_memory(into := bytearray(LARGE_BYTES)))
            assert into == b"x" * LARGE_BYTES
            assert unauthenticated.num_messages == num_before + 1
            with pytest.raises(BlockingIOError):
                mute.recv(1)
        with suppress(ConnectionResetError):
            assert await loop.sock_recv(mute, 1) == b""
    with pytest.raises(ConnectionRefusedError):
        await road.fetch("tcp://127.0.0.1", way, host_memory(bytearray(LARGE_BYTES)))


async def test_readers_that_show_no_token_make_room() -> None:
    road, into = Stream("127.0.0.1"), bytearray(LARGE_BYTES)
    async with road.lend(host_memory(bytearray(b"x" * LARGE_BYTES))) as way:
        port = way.port
        with ExitStack() as mute:
            socks = [mute.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
            await road.fetch("tcp://127.0.0.1", way, host_memory(into))
            socks[0].setblocking(False)
            with suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(socks[0], 1) == b""
    assert into == b"x" * LARGE_BYTES


@pytest.mark.usefixtures("shared_authority")
@pytest.mark.parametrize("kind", ["tcp", "tls"])
@pytest.mark.loops("asyncio", "uvloop")
async def test_a_pull_that_is_cancelled_at_any_moment_writes_no_more_and_the_offer_stands(kind: str) -> None:
    async with near(kind) as source, near(kind) as here:
        ticket = source.offer(host_memory(bytearray(b"x" * LARGE_BYTES)))
        for num_turns in range(24):
            into = bytearray(LARGE_BYTES)
            pull = asyncio.ensure_future(here.pull(ticket, host_memory(into), 60))
            await until(partial(into.startswith, b"x"), pause_s=0)
            for _ in range(num_turns):
                await asyncio.sleep(0)  # each turn of the loop is a case
            if pull.done():
                break
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            into[:] = b"y" * LARGE_BYTES
            await asyncio.sleep(0.002)  # time for what must not happen
            assert into == b"y" * LARGE_BYTES
        assert num_turns
        assert await pulled(here, source.offer(host_memory(bytearray(PAYLOAD)))) == PAYLOAD


@asynccontextmanager
async def socket_that(serve: Callable[[asyncio.StreamWriter], Any]) -> AsyncIterator[KvGrant]:
    """The way to a socket that gives each reader this instead of 100 bytes."""
    writers: list[asyncio.StreamWriter] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readexactly(16)
        with suppress(OSError):
            await serve(writer)

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    try:
        yield KvGrant(port=server.sockets[0].getsockname()[1], token=bytes(16))
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def nothing(_: asyncio.StreamWriter) -> None:
    pass


async def half(writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(50))


async def slowly(writer: asyncio.StreamWriter) -> None:
    for _ in range(10):
        await asyncio.sleep(1.5)
        writer.write(bytes(10))


async def after_a_standstill(writer: asyncio.StreamWriter) -> None:
    asyncio.get_running_loop().stand_still(100)  # type: ignore[attr-defined]  # the clock of tests/clock.py
    writer.write(bytes(100))


async def less(writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(99))
    writer.close()


@pytest.mark.parametrize(
    ("serve", "error", "took_s"),
    [
        (nothing, HandoffStalled, STALL_S),
        (half, HandoffStalled, STALL_S),
        (slowly, None, 15),
        (after_a_standstill, None, 100),
        (less, ConnectionResetError, 0),
    ],
)
@jumping
async def test_without_a_byte_for_two_seconds_a_pull_has_stalled(
    serve: Callable[[asyncio.StreamWriter], Any], error: type[Exception] | None, took_s: float
) -> None:
    async with socket_that(serve) as way:
        began_s = now_s()
        fetch = Stream("127.0.0.1").fetch("tcp://127.0.0.1", way, host_memory(bytearray(100)))
        if error is None:
            await fetch
        else:
            with pytest.raises(error):
                await fetch
        assert now_s() - began_s == pytest.approx(took_s, abs=0.5)


@jumping
async def test_a_source_that_does_not_answer_is_a_stall_and_one_that_is_gone_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}/kv.1"
        ticket = Ticket(wire="tcp", offer_id=1, num_bytes=9, address=address, secret=b"")
        async with near("tcp") as here:
            began_s = now_s()
            with pytest.raises(HandoffStalled):
                await pulled(here, ticket)
            assert now_s() - began_s == pytest.approx(STALL_S, abs=0.5)
            silent.close()
            with pytest.raises(HandoffFailed, match="cannot connect") as failed:
                await pulled(here, ticket)
            assert not isinstance(failed.value, HandoffStalled)


@pytest.mark.parametrize(
    "address", ["", "tcp://a..b:80/k.1", "tcp://127.0.0.1:70000/k.1", "tls://127.0.0.1:80/k.1", "tcp://["]
)
async def test_a_ticket_that_leads_nowhere_fails_the_handoff(address: str) -> None:
    async with near("tcp") as here:
        with pytest.raises(HandoffFailed):
            await pulled(here, Ticket(wire="tcp", offer_id=1, num_bytes=9, address=address, secret=b""))


async def test_memory_of_a_device_is_neither_given_nor_filled_over_tcp() -> None:
    on_device = Memory(address=1 << 40, num_bytes=8, owner=None, device_index=0)
    async with near("tcp") as source, near("tcp") as tcp:
        assert not tcp.moves_device_memory
        with pytest.raises(HandoffFailed, match="that way"):
            await pulled(tcp, source.offer(on_device))
        with pytest.raises(HandoffFailed, match="CUDA"):
            await tcp.pull(source.offer(host_memory(bytearray(8))), on_device, 5)
