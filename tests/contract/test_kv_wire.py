"""Messages of a KV transfer: read whole, bounded, and only of the expected type."""

import asyncio
import socket
import struct
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import HandoffFailed
from tests.clock import run_jumping
from tests.waiting import until
from workers.kv.wire import Ask, Connection, Grant, Refused, Stands


def after_receiving(data: bytes, receive: Any, *, hangs_up: bool = False) -> Any:
    """The result of `receive(connection)` after these bytes have arrived."""

    async def main() -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(data)
            if hangs_up:
                theirs.close()
            return await receive(Connection(ours))

    return run_jumping(main(), limit_s=60)


def word(expected: Any) -> Any:
    def receive(connection: Connection) -> Coroutine[Any, Any, Any]:
        return connection.receive(expected)

    return receive


async def test_a_message_arrives_as_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        sent = Ask(7, b"secret", 4096, direct=True)
        await Connection(theirs).send(sent, Stands())
        here = Connection(ours)
        assert await here.receive(Ask) == sent
        assert await here.receive(Stands) == Stands()


def test_a_message_may_be_longer_than_what_is_read_at_once() -> None:
    with pytest.raises(HandoffFailed, match=r"^n{50000}$"):
        after_receiving(encoded(Refused("n" * 50_000)), word(Grant))


def encoded(sent: Any) -> bytes:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            await Connection(theirs).send(sent)
            return ours.recv(100_000)

    return asyncio.run(main())


def test_an_unexpected_message_is_a_connection_error() -> None:
    with pytest.raises(ConnectionError, match="got Stands instead of Grant"):
        after_receiving(encoded(Stands()), word(Grant))


def test_a_refusal_keeps_its_reason() -> None:
    with pytest.raises(HandoffFailed, match="not today"):
        after_receiving(encoded(Refused("not today")), word(Grant))


@pytest.mark.parametrize("body", [b"\xc1", b"\x80", b"", b"\x91\xa3ask", b"\x91\xa3\xff\xff\xff"])
def test_an_invalid_message_is_a_connection_error(body: bytes) -> None:
    with pytest.raises(ConnectionError, match="not a message"):
        after_receiving(len(body).to_bytes(4, "little") + body, word(Ask))


def test_a_message_over_64_kib_is_refused_before_it_arrives() -> None:
    with pytest.raises(ConnectionError, match="65537 bytes"):
        after_receiving((64 * 1024 + 1).to_bytes(4, "little"), word(Ask))
    with pytest.raises(TimeoutError):
        after_receiving((64 * 1024).to_bytes(4, "little"), word(Ask))


@pytest.mark.parametrize("sent", [b"", b"\x04\0", b"\x04\0\0\0ab"])
def test_a_connection_that_ends_within_a_message_is_an_error(sent: bytes) -> None:
    with pytest.raises(ConnectionResetError):
        after_receiving(sent, word(Ask), hangs_up=True)


def test_bytes_that_end_early_are_an_error() -> None:
    with pytest.raises(ConnectionResetError):
        after_receiving(b"abc", lambda here: here.receive_bytes(memoryview(bytearray(4))), hangs_up=True)


def test_a_peer_is_quiet_until_it_says_something_or_hangs_up() -> None:
    async def quiet_after_one(connection: Connection) -> bool:
        await connection.receive(Stands)
        return connection.is_quiet()

    one = encoded(Stands())
    assert after_receiving(one, quiet_after_one)
    for more, hangs_up in ((one, False), (b"x", False), (b"", True)):
        assert not after_receiving(one + more, quiet_after_one, hangs_up=hangs_up)


async def test_a_connection_that_was_reset_is_not_quiet_and_can_be_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours:
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        connection = Connection(ours)
        await until(lambda: not connection.is_quiet())
        connection.shut_down(socket.SHUT_RDWR)


async def test_others_have_their_turn_while_a_large_payload_moves_without_waiting() -> None:
    class Fast(Connection):
        async def _read_into(self, into: memoryview) -> int:
            return len(into)

        async def _write(self, data: bytes | memoryview) -> None:
            pass

    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        task = asyncio.create_task(other())
        fast, payload = Fast(ours), memoryview(bytearray(8 << 20))
        await fast.receive_bytes(payload)
        assert num_turns >= 30
        await fast.send_between(Grant(), payload, Stands())
        assert num_turns >= 60
        task.cancel()
