"""A pull that gets no byte fails soon, whatever is left of its time; a slow one does not."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from baton.errors import HandoffFailed, HandoffStalled
from tests.clock import run_jumping
from workers.kv.connections import Connections
from workers.kv.memory import host_memory
from workers.kv.pulls import Pulls
from workers.kv.source import Peer
from workers.kv.stall import STALL_S, stalling
from workers.kv.transceiver import Ticket
from workers.kv.wire import Ask, Connection, Fetched, Grant, Refused, Stands

NUM_BYTES = 100


@asynccontextmanager
async def source(serve: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Ticket]:
    """The ticket of a source that treats each connection like this."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def accept() -> None:
            while True:
                sock, _ = await loop.sock_accept(listener)
                with sock:
                    await serve(Connection(sock))

        task = asyncio.create_task(accept())
        port = listener.getsockname()[1]
        peer = msgspec.msgpack.encode(Peer("127.0.0.1", port, b"secret"))
        try:
            yield Ticket(wire="tcp", offer_id=1, num_bytes=NUM_BYTES, peer=peer)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def pulled(ticket: Ticket, deadline_s: float = 60) -> tuple[bytes, float]:
    """The bytes of a pull, and how long it took."""
    pulls, into, loop = Pulls("tcp"), bytearray(NUM_BYTES), asyncio.get_running_loop()
    began_s = loop.time()
    try:
        await pulls.pull(ticket, host_memory(into), deadline_s)
        return bytes(into), loop.time() - began_s
    finally:
        await pulls.close()


async def mute(connection: Connection) -> None:
    await asyncio.Event().wait()


async def mute_after_half(connection: Connection) -> None:
    await connection.receive(Ask)
    await connection.send(Grant())
    await asyncio.get_running_loop().sock_sendall(connection.sock, bytes(NUM_BYTES // 2))
    await asyncio.Event().wait()


async def slow(connection: Connection) -> None:
    await connection.receive(Ask)
    await connection.send(Grant())
    for _ in range(NUM_BYTES // 10):
        await asyncio.sleep(1.5)
        await asyncio.get_running_loop().sock_sendall(connection.sock, bytes(10))
    await connection.send(Stands())
    await connection.receive(Fetched)


async def after_a_standstill(connection: Connection) -> None:
    await connection.receive(Ask)
    asyncio.get_running_loop().stand_still(100)  # type: ignore[attr-defined]  # the clock of tests/clock.py
    await connection.send_between(Grant(), memoryview(bytes(NUM_BYTES)), Stands())
    await connection.receive(Fetched)


def test_bytes_count_when_the_source_says_that_the_offer_stands_and_are_confirmed_after_that() -> None:
    heard: list[bytes] = []

    async def tells_nothing_more(connection: Connection) -> None:
        await connection.receive(Ask)
        await connection.send(Grant())
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection.sock, bytes(NUM_BYTES))
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                heard.append(await loop.sock_recv(connection.sock, 100))

    async def main() -> None:
        async with source(tells_nothing_more) as ticket:
            with pytest.raises(HandoffFailed, match="the source of the KV was lost"):
                await pulled(ticket)
        assert heard == []

    run_jumping(main())


def test_a_puller_that_is_refused_hangs_up() -> None:
    ended = asyncio.Event()

    async def refusing(connection: Connection) -> None:
        await connection.receive(Ask)
        await connection.send(Refused("not today"))
        assert await asyncio.get_running_loop().sock_recv(connection.sock, 1) == b""
        ended.set()

    async def main() -> None:
        async with source(refusing) as ticket:
            with pytest.raises(HandoffFailed, match="not today") as failed:
                await pulled(ticket)
            await ended.wait()
            assert failed.value.__traceback__  # whose frames have the connection

    run_jumping(main(), limit_s=60)


def test_a_source_that_vanished_without_a_word_is_noticed_in_three_seconds() -> None:
    async def main() -> None:
        async with source(mute) as ticket:
            peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
            connection = await Connections().new((peer.host, peer.port))
            with connection.sock as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle_s, every_s, num = (
                    sock.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle_s + every_s * num == 3

    run_jumping(main())


@pytest.mark.parametrize("serve", [mute, mute_after_half])
def test_a_source_that_sends_nothing_is_given_up_after_two_seconds(
    serve: Callable[[Connection], Awaitable[None]],
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with source(serve) as ticket:
            began_s = loop.time()
            with pytest.raises(HandoffStalled, match=r"nothing came from .* for 2 s"):
                await pulled(ticket)
            assert loop.time() - began_s == pytest.approx(2, abs=0.5)

    run_jumping(main())


def test_a_slow_source_has_all_the_time_of_its_handoff() -> None:
    async def main() -> None:
        async with source(slow) as ticket:
            found, took_s = await pulled(ticket)
            assert found == bytes(NUM_BYTES)
            assert took_s > 10
            with pytest.raises(HandoffFailed, match="did not arrive within 5 s"):
                await pulled(ticket, deadline_s=5)

    run_jumping(main())


def test_a_process_that_stood_still_itself_first_reads_what_has_arrived() -> None:
    async def main() -> None:
        async with source(after_a_standstill) as ticket:
            found, took_s = await pulled(ticket, deadline_s=1000)
            assert found == bytes(NUM_BYTES)
            assert took_s > 100

    run_jumping(main())


def test_what_has_ended_is_not_watched_any_more() -> None:
    errors: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        async with stalling():
            pass
        await asyncio.sleep(STALL_S * 2)

    run_jumping(main())
    assert errors == []


def test_a_pause_is_no_stall_but_silence_after_it_is() -> None:
    async def pause_then_silence() -> None:
        async with stalling() as stall:
            with stall.paused():
                await asyncio.sleep(30)
            await asyncio.sleep(30)

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await pause_then_silence()
        return asyncio.get_running_loop().time()

    assert run_jumping(main()) == pytest.approx(30 + STALL_S, abs=STALL_S / 4)
