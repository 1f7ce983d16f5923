"""HTTPS on real sockets: who gets in, and what clients that never get in leave behind."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from baton.tls import server_context
from frontend.http.exchange import Exchange
from frontend.http.server import Connection, HttpServer
from tests.alive import Newborn
from tests.certificates import Authority
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop")
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    exchange = Exchange(scope, receive, send)
    await exchange.start(200, b"text/plain", [(b"content-length", b"5")])
    await exchange.end(scope["scheme"].encode())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


class Door:
    """A server that serves HTTPS at `port`."""

    def __init__(self, tls: Callable[[], ssl.SSLContext], max_connections: int | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._server: HttpServer | None = HttpServer(app, 5.0, max_connections=max_connections, tls=tls)

    async def __aenter__(self) -> Self:
        assert self._server is not None
        self._server.start(self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    async def drain(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.drain()

    async def get(self, tls: ssl.SSLContext | None) -> bytes:
        """The whole answer; empty if there is none."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
            writer.write(GET)
            answer = await reader.read()
            writer.transport.abort()
        except OSError:  # of TLS, too
            return b""
        return answer


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_client_that_trusts_the_authority_is_answered_and_a_plain_one_is_not(
    authority: Authority, tmp_path: Path
) -> None:
    contexts = [server_context(*authority.sign("server"))]
    async with Door(lambda: contexts[-1]) as door:
        assert (await door.get(authority.client())).endswith(b"\r\n\r\nhttps")
        assert await door.get(None) == b""
        old = authority.client()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert await door.get(old) == b""
        another = Authority(tmp_path / "another")
        contexts.append(server_context(*another.sign("server")))  # renewed while it serves
        assert await door.get(authority.client()) == b""
        assert (await door.get(another.client())).endswith(b"\r\n\r\nhttps")


async def test_with_a_clients_authority_only_its_clients_are_answered(
    authority: Authority, tmp_path: Path
) -> None:
    context = server_context(*authority.sign("server"), authority.ca)
    foreign = Authority(tmp_path / "theirs").sign("client")
    async with Door(lambda: context) as door:
        assert await door.get(authority.client()) == b""
        assert await door.get(authority.client(foreign)) == b""
        assert (await door.get(authority.client(authority.sign("client")))).endswith(b"https")


async def test_clients_that_do_not_shake_hands_leave_nothing_behind_and_hold_up_nothing(
    authority: Authority,
) -> None:
    context, connections = server_context(*authority.sign("server")), Newborn(Connection)
    async with Door(lambda: context) as door:
        assert await door.get(authority.client())  # which opens what stays open
        before = num_descriptors()
        for first in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", bytes(1000)):
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", door.port)) as client:
                    client.sendall(first)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert await door.get(authority.client())
        await until(lambda: num_descriptors() <= before, 30.0, pause_s=0.1)
        await until(lambda: connections.count() == 0, 30.0, pause_s=0.1)


@pytest.fixture
def _slow_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what does not wait for a handshake ends within PATIENCE_S."""
    monkeypatch.setattr("baton.listener._HANDSHAKE_S", 3 * PATIENCE_S)


@pytest.mark.usefixtures("_slow_handshakes")
async def test_the_longest_handshake_makes_room(authority: Authority) -> None:
    context = server_context(*authority.sign("server"))
    async with Door(lambda: context, max_connections=3) as door:
        with ExitStack() as opened:
            waiting = [
                opened.enter_context(socket.create_connection(("127.0.0.1", door.port))) for _ in range(10)
            ]
            assert await door.get(authority.client())
            for sock in waiting[:8]:
                sock.settimeout(PATIENCE_S)
                assert await asyncio.to_thread(sock.recv, 1) == b""


@pytest.mark.usefixtures("_slow_handshakes")
async def test_a_drain_does_not_wait_long_for_a_handshake(authority: Authority) -> None:
    context = server_context(*authority.sign("server"))
    async with Door(lambda: context) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as silent:
            assert await door.get(authority.client())  # accepted after it
            async with asyncio.timeout(PATIENCE_S):
                await door.drain()
            silent.settimeout(PATIENCE_S)
            assert await asyncio.to_thread(silent.recv, 1) == b""


@pytest.mark.parametrize("broken", ["cert", "key", "both", "missing", "encrypted", "ca"])
def test_files_that_are_not_a_certificate_and_its_key_are_refused(
    broken: str, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.sign("server")
    other = authority.sign("other")
    if broken == "encrypted":
        authority.encrypt(key)
    files = {
        "cert": (key, key),
        "key": (cert, other.key),
        "both": (key, cert),
        "missing": (cert, tmp_path / "none"),
        "encrypted": (cert, key),
        "ca": (cert, key, key),
    }[broken]
    with pytest.raises(ValueError, match=r"certificate|encrypted") as refused:
        server_context(*files)
    assert not isinstance(refused.value, OSError)
    assert "_ssl.c" not in str(refused.value)
