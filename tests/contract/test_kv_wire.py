"""Messages of a KV transfer: read whole, bounded, and only of the expected type."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from baton.errors import HandoffFailed
from tests.clock import run_jumping
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


def test_a_message_arrives_as_sent() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            sent = Ask(7, b"secret", 4096, direct=True)
            await Connection(theirs).send(sent, Stands())
            here = Connection(ours)
            assert await here.receive(Ask) == sent
            assert await here.receive(Stands) == Stands()

    asyncio.run(main())


def encoded(sent: Any) -> bytes:
    async def main() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            await Connection(theirs).send(sent)
            return ours.recv(1000)

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
