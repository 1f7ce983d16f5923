"""A listener with TLS: how long clients may take for their part of a handshake and of a goodbye."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import pytest

from baton.listener import Listener
from tests.certificates import shared_peer
from tests.clock import jumping
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("shared_authority")


class Heard(asyncio.Protocol):
    """Hangs up at once, if asked to; records when its connection was made and lost."""

    def __init__(self, *, hangs_up: bool = False) -> None:
        self.made_s: float | None = None
        self.lost_s: float | None = None
        self._hangs_up = hangs_up

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made_s = asyncio.get_running_loop().time()
        if self._hangs_up:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost_s = asyncio.get_running_loop().time()


@contextlib.contextmanager
def listening(protocol: Heard) -> Iterator[tuple[Listener, tuple[str, int]]]:
    sock, tls = socket.create_server(("127.0.0.1", 0)), shared_peer()
    address = sock.getsockname()
    listener = Listener(sock, lambda _: protocol, lambda: None, lambda: tls.accepting)
    try:
        yield listener, address
    finally:
        listener.close()


def connected(address: tuple[str, int]) -> ssl.SSLSocket:
    """A client that has shaken hands and reads nothing."""
    return shared_peer().connecting.wrap_socket(socket.create_connection(address))


@jumping
async def test_it_settles_when_hands_are_shaken_and_hangs_up_on_those_that_take_two_seconds() -> None:
    loop, heard = asyncio.get_running_loop(), Heard()
    with listening(heard) as (listener, address):
        await listener.settled()  # nothing to wait for
        with await loop.run_in_executor(None, connected, address):
            await until(lambda: heard.made_s is not None)
            with socket.create_connection(address) as silent:
                silent.setblocking(False)
                await asyncio.sleep(0.5)  # it is accepted
                began_s = loop.time()
                await listener.settled()
                assert loop.time() - began_s == pytest.approx(2, abs=0.3)
                assert await loop.sock_recv(silent, 1) == b""
                await listener.settled()
            assert heard.lost_s is None


@jumping
async def test_a_client_that_does_not_shake_hands_is_disconnected_after_ten_seconds() -> None:
    loop, heard = asyncio.get_running_loop(), Heard()
    with listening(heard) as (_, address), socket.create_connection(address) as silent:
        silent.setblocking(False)
        assert await loop.sock_recv(silent, 1) == b""
        assert loop.time() == pytest.approx(10, abs=1)
        await until(lambda: heard.lost_s is not None)


@jumping
async def test_a_client_that_does_not_say_goodbye_is_gone_after_two_seconds() -> None:
    loop, heard = asyncio.get_running_loop(), Heard(hangs_up=True)
    with listening(heard) as (_, address), await loop.run_in_executor(None, connected, address):
        await until(lambda: heard.lost_s is not None)
        assert heard.lost_s is not None
        assert heard.made_s is not None
        assert heard.lost_s - heard.made_s == pytest.approx(2, abs=0.3)
