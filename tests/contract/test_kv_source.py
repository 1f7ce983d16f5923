"""The source of a KV transfer, with pullers that follow the protocol and others that do not."""

import asyncio
import gc
import os
import resource
import socket
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.strangers import strangers
from tests.clock import run_jumping
from tests.waiting import until
from workers.kv.memory import Memory, host_memory
from workers.kv.source import Lend, Peer, Source
from workers.kv.transceiver import Ticket
from workers.kv.wire import Ask, Connection, Fetched, Grant, Refused, Stands

PAYLOAD = bytes(range(256)) * 16
LARGE_BYTES = 64 << 20  # more than the sockets hold


@asynccontextmanager
async def source(lend_direct: Lend | None = None) -> AsyncIterator[Source]:
    each = Source("tcp", "127.0.0.1", lend_direct)
    await each.start()
    try:
        yield each
    finally:
        await each.close()


def offer(each: Source) -> Ticket:
    return each.offer(host_memory(bytearray(PAYLOAD)))


class Puller:
    """One connection to the source of a ticket, step by step."""

    def __init__(self, sock: socket.socket, ticket: Ticket) -> None:
        self.sock = sock
        self.connection = Connection(sock)
        self._ticket = ticket

    async def ask(self, *, direct: bool = False, **other: Any) -> None:
        peer = msgspec.msgpack.decode(self._ticket.peer, type=Peer)
        ticket = self._ticket
        words = {"offer_id": ticket.offer_id, "secret": peer.secret, "num_bytes": ticket.num_bytes, **other}
        await self.connection.send(Ask(direct=direct, **words))

    async def fetch(self) -> bytes:
        await self.connection.receive(Grant)
        into = bytearray(self._ticket.num_bytes)
        await self.connection.receive_bytes(memoryview(into))
        await self.connection.receive(Stands)
        return bytes(into)

    async def confirm(self) -> None:
        await self.connection.send(Fetched())


@asynccontextmanager
async def puller(ticket: Ticket) -> AsyncIterator[Puller]:
    peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (peer.host, peer.port))
        yield Puller(sock, ticket)


def is_moved(each: Source, ticket: Ticket) -> bool:
    return each._offers[ticket.offer_id].moved.done()  # noqa: SLF001  `moved` waits, it does not tell


async def refused(wait: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(HandoffFailed, match="no longer offered"):
        await wait


def test_an_offer_has_moved_when_its_puller_says_so_and_not_before() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask()
                assert await there.fetch() == PAYLOAD
                assert not is_moved(here, ticket)
                await there.confirm()
                await here.moved(ticket)

    run_jumping(main())


def test_bytes_of_an_offer_that_was_withdrawn_meanwhile_do_not_count() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = here.offer(host_memory(bytearray(LARGE_BYTES)))
            async with puller(ticket) as there:
                await there.ask()
                await there.connection.receive(Grant)
                here.withdraw(ticket)
                with pytest.raises(ConnectionResetError):
                    await there.connection.receive_bytes(memoryview(bytearray(LARGE_BYTES)))
            async with puller(ticket) as late:
                await late.ask()
                await refused(late.fetch())
            with pytest.raises(HandoffFailed, match="withdrawn"):
                await here.moved(ticket)

    run_jumping(main())


def test_an_offer_ends_with_the_first_of_two_pulls() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = here.offer(host_memory(bytearray(LARGE_BYTES)))
            async with puller(ticket) as first, puller(ticket) as second:
                await second.ask()
                await second.connection.receive(Grant)
                await first.ask()
                await first.fetch()
                await first.confirm()
                assert await here.moved(ticket) == LARGE_BYTES
                with pytest.raises(ConnectionResetError):
                    await second.connection.receive_bytes(memoryview(bytearray(LARGE_BYTES)))
            async with puller(ticket) as third:
                await third.ask()
                await refused(third.fetch())

    run_jumping(main())


def test_a_puller_that_hangs_up_before_it_confirms_has_moved_nothing() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask()
                await there.fetch()
            await asyncio.sleep(1)  # time for what must not happen
            assert not is_moved(here, ticket)
            async with puller(ticket) as another:
                await another.ask()
                assert await another.fetch() == PAYLOAD
                await another.confirm()

    run_jumping(main())


@pytest.mark.parametrize("wrong", [{"offer_id": 99}, {"secret": b""}, {"secret": bytes(16)}])
def test_a_puller_without_a_ticket_gets_no_bytes(wrong: dict[str, Any]) -> None:
    async def main() -> None:
        num_before = strangers.num_messages
        async with source() as here, puller(offer(here)) as there:
            await there.ask(**wrong)
            await refused(there.fetch())
            assert await asyncio.get_running_loop().sock_recv(there.sock, 1) == b""
        assert strangers.num_messages == num_before + ("secret" in wrong)

    run_jumping(main())


@pytest.mark.parametrize("num_bytes", [0, -1, len(PAYLOAD) + 1])
def test_no_more_than_the_offer_is_read(num_bytes: int) -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask(num_bytes=num_bytes)
                with pytest.raises(
                    HandoffFailed, match=f"{num_bytes} bytes were asked for; 4096 are offered"
                ):
                    await there.fetch()
            assert not is_moved(here, ticket)

    run_jumping(main())


def test_secrets_are_long_and_never_the_same() -> None:
    async def main() -> None:
        async with source() as here:
            secrets = {msgspec.msgpack.decode(offer(here).peer, type=Peer).secret for _ in range(50)}
            assert len(secrets) == 50
            assert min(map(len, secrets)) >= 16

    run_jumping(main())


def test_a_puller_that_wants_to_read_by_itself_is_refused_by_a_source_that_only_streams() -> None:
    async def main() -> None:
        async with source() as here, puller(offer(here)) as there:
            await there.ask(direct=True)
            with pytest.raises(HandoffFailed, match="this memory cannot be read over"):
                await there.fetch()

    run_jumping(main())


def test_memory_of_a_device_is_not_streamed() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = here.offer(Memory(address=0, num_bytes=4, owner=None, device_index=0))
            async with puller(ticket) as there:
                await there.ask()
                with pytest.raises(HandoffFailed, match="this memory cannot be read over"):
                    await there.fetch()

    run_jumping(main())


@asynccontextmanager
async def lent(connection: Connection, payload: Memory, num_bytes: int) -> AsyncIterator[None]:
    await connection.send(Grant(b"where"))
    yield


@pytest.mark.parametrize("says_more", [False, True])
def test_a_direct_read_counts_unless_its_puller_gave_up_meanwhile(says_more: bool) -> None:
    async def main() -> None:
        async with source(lent) as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask(direct=True)
                assert await there.connection.receive(Grant) == Grant(b"where")
                await there.connection.send(Fetched(), *[Fetched()] * says_more)
                if says_more:
                    with pytest.raises(ConnectionResetError):
                        await there.connection.receive(Stands)
                else:
                    await there.connection.receive(Stands)
            assert is_moved(here, ticket) is not says_more

    run_jumping(main())


def test_a_puller_that_has_gone_before_its_read_ended_has_moved_nothing() -> None:
    go_on = asyncio.Event()

    @asynccontextmanager
    async def slow(connection: Connection, payload: Memory, num_bytes: int) -> AsyncIterator[None]:
        async with lent(connection, payload, num_bytes):
            yield
            await go_on.wait()

    async def main() -> None:
        async with source(slow) as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask(direct=True)
                await there.connection.receive(Grant)
                await there.confirm()
            go_on.set()
            await until(lambda: not here._tasks)  # noqa: SLF001  a session is a connection
            assert not is_moved(here, ticket)

    run_jumping(main())


def test_a_puller_that_refuses_is_let_go() -> None:
    unread: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: unread.append(error))
        async with source() as here, puller(offer(here)) as there:
            await there.connection.send(Refused("not what a puller says"))
            with pytest.raises(ConnectionResetError):
                await there.connection.receive(Grant)
            await until(lambda: not here._tasks)  # noqa: SLF001  a session is a connection
        gc.collect()

    run_jumping(main())
    assert unread == []


def test_one_that_hangs_up_is_no_stranger() -> None:
    async def main() -> None:
        num_before = strangers.num_messages
        async with source() as here:
            async with puller(offer(here)):
                await until(lambda: here._tasks)  # noqa: SLF001  a session is a connection
            await until(lambda: not here._tasks)  # noqa: SLF001
        assert strangers.num_messages == num_before

    run_jumping(main())


def test_a_connection_that_asks_for_nothing_is_closed_after_five_seconds() -> None:
    async def main() -> None:
        async with source() as here:
            loop = asyncio.get_running_loop()
            for first_bytes in (b"", b"\x08\0\0"):
                async with puller(offer(here)) as silent:
                    began_s = loop.time()
                    await loop.sock_sendall(silent.sock, first_bytes)
                    assert await loop.sock_recv(silent.sock, 1) == b""
                    assert loop.time() - began_s == pytest.approx(5.0, abs=0.1)

    run_jumping(main())


def test_noise_closes_its_own_connection_only() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            loop = asyncio.get_running_loop()
            num_before = strangers.num_messages
            for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1"):
                async with puller(ticket) as noisy:
                    await loop.sock_sendall(noisy.sock, noise)
                    began_s = loop.time()
                    with pytest.raises(ConnectionError):
                        await noisy.connection.receive_bytes(memoryview(bytearray(1)))
                    assert loop.time() - began_s < 1
            assert strangers.num_messages == num_before + 3
            async with puller(ticket) as there:
                await there.ask()
                assert await there.fetch() == PAYLOAD
            assert strangers.num_messages == num_before + 3

    run_jumping(main())


def test_one_connection_more_than_the_limit_takes_the_place_of_the_oldest_that_asks_for_nothing() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
            loop = asyncio.get_running_loop()
            with ExitStack() as stack:
                place = (peer.host, peer.port)
                mute = [stack.enter_context(socket.create_connection(place)) for _ in range(256)]
                for sock in mute:
                    sock.setblocking(False)
                began_s = loop.time()
                async with puller(ticket) as one_more:
                    await one_more.ask()
                    assert await one_more.fetch() == PAYLOAD
                    assert await loop.sock_recv(mute[0], 1) == b""
                assert loop.time() - began_s < 1, "it did not wait for the time that the mute have"

    run_jumping(main())


@contextmanager
def descriptors(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_quarter_of_the_descriptors_are_pullers_and_none_that_is_served_makes_room() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with descriptors(4 * 4):
            here = Source("tcp", "127.0.0.1")
        await here.start()
        ticket = offer(here)
        async with AsyncExitStack() as stack:
            served = [await stack.enter_async_context(puller(ticket)) for _ in range(4)]
            for there in served:
                await there.ask()
                await there.fetch()
            began_s = loop.time()
            one_more = await stack.enter_async_context(puller(ticket))
            with suppress(ConnectionResetError):
                assert await loop.sock_recv(one_more.sock, 1) == b""
            assert loop.time() - began_s < 4, "before its time to ask is over"
            await served[0].confirm()
            assert await here.moved(ticket) == len(PAYLOAD)
            another = offer(here)
            idle = await stack.enter_async_context(puller(another))  # in the place of the one that was served
            await idle.ask()
            assert await idle.fetch() == PAYLOAD
        await here.close()

    run_jumping(main())


def test_one_that_makes_room_is_gone_although_it_does_not_hang_up() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            async with puller(ticket) as there:
                await there.ask()
                await there.fetch()
                await there.confirm()
                await here.moved(ticket)
                await until(here._sessions.make_room)  # noqa: SLF001  as for a puller too many
                await until(lambda: not here._tasks)  # noqa: SLF001  a session is a connection

    run_jumping(main())


def test_without_a_descriptor_to_spare_one_that_asks_for_nothing_makes_room() -> None:
    async def main() -> None:
        async with source() as here:
            loop, ticket = asyncio.get_running_loop(), offer(here)
            peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
            # Without a descriptor `accept` fails although none waits, so that the second one goes too.
            async with puller(ticket) as mute, puller(ticket):
                await until(lambda: len(here._tasks) == 2)  # noqa: SLF001  a session is a connection
                with socket.socket() as sock:
                    sock.setblocking(False)
                    next_free = os.dup(sock.fileno())
                    os.close(next_free)
                    with descriptors(next_free):
                        began_s = loop.time()
                        await loop.sock_connect(sock, (peer.host, peer.port))
                        there = Puller(sock, ticket)
                        await there.ask()
                        assert await there.fetch() == PAYLOAD
                        assert loop.time() - began_s < 4, "not only when the mute one's time is over"
                    assert await loop.sock_recv(mute.sock, 1) == b""

    run_jumping(main(), limit_s=60)


async def test_pullers_that_hung_up_half_way_leave_their_places() -> None:
    async with source() as here:
        ticket = offer(here)
        for _ in range(256):
            async with puller(ticket) as half_way:
                await half_way.ask()
                await half_way.fetch()
        async with puller(ticket) as another:
            await another.ask()
            assert await another.fetch() == PAYLOAD


def test_closing_hangs_up_on_every_puller_and_offers_nothing_any_more() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            moved = asyncio.ensure_future(here.moved(ticket))
            async with puller(ticket) as there:
                await there.ask()
                await there.fetch()
                await here.close()
                assert not here._tasks, "none is served any more"  # noqa: SLF001  a session is a connection
                with pytest.raises(OSError, match=r"closed|reset"):
                    await there.connection.receive_bytes(memoryview(bytearray(1)))
            with pytest.raises(HandoffFailed):
                await moved
            with pytest.raises(HandoffFailed, match="closed"):
                offer(here)
            with pytest.raises(ConnectionRefusedError):
                async with puller(ticket):
                    pass

    run_jumping(main())


def test_an_offer_of_nothing_is_refused() -> None:
    async def main() -> None:
        async with source() as here:
            with pytest.raises(ValueError, match="at least one byte"):
                here.offer(host_memory(bytearray()))

    run_jumping(main())


def test_withdrawn_memory_is_released_when_its_reader_has_hung_up() -> None:
    async def main() -> None:
        async with source() as here:
            payload = host_memory(bytearray(PAYLOAD))
            lent = weakref.ref(payload)
            ticket = here.offer(payload)
            del payload
            async with puller(ticket) as there:
                await there.ask()
                await there.fetch()
                here.withdraw(ticket)
                assert await asyncio.get_running_loop().sock_recv(there.sock, 1) == b""
                await asyncio.sleep(1)  # time for what must not happen
                assert lent() is not None
            await until(lambda: lent() is None)

    run_jumping(main())


def test_cancelling_the_wait_for_a_move_keeps_the_offer() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await here.moved(ticket)
            async with puller(ticket) as there:
                await there.ask()
                assert await there.fetch() == PAYLOAD
                await there.confirm()
            await here.moved(ticket)

    run_jumping(main())


def test_a_process_without_descriptors_to_spare_accepts_again_when_it_has_some() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            with socket.socket() as sock:
                sock.setblocking(False)
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                try:
                    await asyncio.get_running_loop().sock_connect(sock, (peer.host, peer.port))
                    await asyncio.sleep(1)  # the source fails meanwhile
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                there = Puller(sock, ticket)
                await there.ask()
                assert await there.fetch() == PAYLOAD

    run_jumping(main(), limit_s=60)


def test_a_machine_that_vanished_is_noticed_in_half_a_minute() -> None:
    async def main() -> None:
        async with source() as here:
            ticket = offer(here)
            port = msgspec.msgpack.decode(ticket.peer, type=Peer).port
            async with puller(ticket) as there:
                await there.ask()
                await there.fetch()
                (session,) = [
                    each
                    for each in gc.get_objects()
                    if type(each) is socket.socket
                    and each.fileno() >= 0
                    and each.family == socket.AF_INET
                    and each.getsockname()[1] == port
                    and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                ]
                assert session.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle_s, every_s, num = (
                    session.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle_s + every_s * num == 30

    run_jumping(main())
