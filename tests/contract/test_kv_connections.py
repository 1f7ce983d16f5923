"""A puller keeps its connection to a source for the next pull, and survives its loss."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.errors import HandoffFailed
from tests.clock import run_jumping
from tests.waiting import until
from workers.kv.connections import IDLE_S, Connections
from workers.kv.memory import Memory, host_memory
from workers.kv.pulls import Pulls
from workers.kv.source import Peer, Source
from workers.kv.transceiver import Ticket

PAYLOAD = bytes(range(256)) * 16


class Pair:
    """A source and a puller."""

    def __init__(self) -> None:
        self.source = Source("tcp", "127.0.0.1")
        self.pulls = Pulls("tcp")

    @property
    def num_connections(self) -> int:
        return len(self.source._tasks)  # noqa: SLF001  a session is a connection

    async def pull(self) -> None:
        ticket = self.source.offer(host_memory(bytearray(PAYLOAD)))
        into = bytearray(len(PAYLOAD))
        await self.pulls.pull(ticket, host_memory(into), 5)
        assert into == PAYLOAD
        assert await self.source.moved(ticket) == len(PAYLOAD)


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    each = Pair()
    await each.source.start()
    try:
        yield each
    finally:
        await each.pulls.close()
        await each.source.close()


def test_pulls_one_after_the_other_share_a_connection() -> None:
    async def main() -> None:
        async with pair() as each:
            for _ in range(5):
                await each.pull()
                assert each.num_connections == 1

    run_jumping(main())


def test_pulls_at_once_have_a_connection_each_and_keep_them() -> None:
    async def main() -> None:
        async with pair() as each:
            for _ in range(3):
                await asyncio.gather(*[each.pull() for _ in range(7)])
                assert each.num_connections == 7

    run_jumping(main())


def test_after_many_pulls_at_once_only_the_connections_in_use_are_kept() -> None:
    async def main() -> None:
        async with pair() as each:
            await asyncio.gather(*[each.pull() for _ in range(3)])
            for _ in range(10):
                await asyncio.sleep(IDLE_S / 8)
                await each.pull()
            await until(lambda: each.num_connections == 1)

    run_jumping(main())


def test_nothing_is_remembered_of_what_has_ended() -> None:
    async def main() -> None:
        async with pair() as each:
            await each.pull()
            assert not each.pulls._running  # noqa: SLF001  nothing public tells
            await asyncio.sleep(IDLE_S + 1)
            assert not each.pulls._connections._idle  # noqa: SLF001  nothing public tells

    run_jumping(main())


def test_closing_returns_when_no_pull_writes_any_more() -> None:
    ended: list[str] = []

    async def slow_to_end(ticket: Ticket, into: Memory) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append("a pull")

    async def main() -> None:
        pulls = Pulls("tcp", slow_to_end)
        ticket = Ticket(wire="tcp", offer_id=1, num_bytes=1, peer=b"")
        pull = asyncio.ensure_future(pulls.pull(ticket, host_memory(bytearray(1)), 60))
        await asyncio.sleep(1)
        await pulls.close()
        assert ended == ["a pull"]
        with pytest.raises(HandoffFailed, match="closed during the pull"):
            await pull

    run_jumping(main())


def test_a_connection_that_is_not_made_leaves_no_descriptor() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            refusing = ("127.0.0.1", listener.getsockname()[1])
        num_before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConnectionRefusedError) as failed:
            await Connections().new(refusing)
        assert failed.value.__traceback__  # whose frames have the socket
        assert len(os.listdir("/proc/self/fd")) == num_before

    run_jumping(main())


def test_an_unused_connection_is_closed_after_a_minute() -> None:
    async def main() -> None:
        async with pair() as each:
            assert IDLE_S == 60
            await each.pull()
            await asyncio.sleep(IDLE_S - 1)  # not yet
            assert each.num_connections == 1
            await each.pull()
            await asyncio.sleep(IDLE_S - 1)  # used meanwhile
            assert each.num_connections == 1
            await asyncio.sleep(2)  # now
            await until(lambda: not each.num_connections)

    run_jumping(main(), limit_s=600)


def test_a_source_that_hung_up_is_called_again() -> None:
    async def main() -> None:
        async with pair() as each:
            for _ in range(3):
                await each.pull()
                assert each.source._sessions.make_room()  # noqa: SLF001  as for a puller too many
                await each.pull()

    run_jumping(main())


def test_a_source_that_hangs_up_when_it_is_asked_is_called_again() -> None:
    async def main() -> None:
        async with pair() as each:
            await each.pull()
            ticket = each.source.offer(host_memory(bytearray(PAYLOAD)))
            pull = asyncio.ensure_future(each.pulls.pull(ticket, host_memory(bytearray(len(PAYLOAD))), 5))
            await asyncio.sleep(0)  # it has taken the kept connection
            each.source._sessions.make_room()  # noqa: SLF001  as for a puller too many
            await pull

    run_jumping(main())


def test_a_pull_that_was_refused_or_cancelled_leaves_no_connection() -> None:
    async def main() -> None:
        async with pair() as each:
            await each.pull()
            gone = each.source.offer(host_memory(bytearray(PAYLOAD)))
            each.source.withdraw(gone)
            with pytest.raises(HandoffFailed, match="no longer offered"):
                await each.pulls.pull(gone, host_memory(bytearray(len(PAYLOAD))), 5)
            await until(lambda: not each.num_connections)
            large = each.source.offer(host_memory(bytearray(64 << 20)))
            pull = asyncio.ensure_future(each.pulls.pull(large, host_memory(bytearray(64 << 20)), 5))
            await until(lambda: each.num_connections, pause_s=0)  # nothing is sent yet
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            await until(lambda: not each.num_connections)
            await each.pull()

    run_jumping(main())


def test_closing_the_puller_closes_its_connections() -> None:
    async def main() -> None:
        async with pair() as each:
            await asyncio.gather(*[each.pull() for _ in range(3)])
            await each.pulls.close()
            await until(lambda: not each.num_connections)

    run_jumping(main())


@pytest.mark.parametrize(
    ("host", "port"), [("a..b", 80), ("127.0.0.1", 70_000), ("a" * 70, 80), ("127.0.0.1", -1)]
)
async def test_a_ticket_with_an_impossible_address_fails_the_handoff(host: str, port: int) -> None:
    async with pair() as each:
        ticket = each.source.offer(host_memory(bytearray(PAYLOAD)))
        peer = msgspec.msgpack.encode(Peer(host, port, b"secret"))
        wrong = msgspec.structs.replace(ticket, peer=peer)
        with pytest.raises(HandoffFailed):
            await each.pulls.pull(wrong, host_memory(bytearray(len(PAYLOAD))), 5)
        assert not each.pulls._connections._idle  # noqa: SLF001  nothing public tells
        await each.pull()


@pytest.mark.parametrize(
    "peer", [b"", b"\xc1", b"\x93\xa2\xff\xff\x01\xc4\x00"], ids=["empty", "no type", "not UTF-8"]
)
async def test_a_ticket_that_cannot_be_read_fails_the_handoff(peer: bytes) -> None:
    async with pair() as each:
        ticket = msgspec.structs.replace(each.source.offer(host_memory(bytearray(PAYLOAD))), peer=peer)
        with pytest.raises(HandoffFailed):
            await each.pulls.pull(ticket, host_memory(bytearray(len(PAYLOAD))), 5)
