"""How connections end: the server drains, a client closes or speaks HTTP/1.0. On real sockets."""

import asyncio
import socket
from contextlib import suppress
from typing import Self

import msgspec
import pytest

from frontend.http.body import Bodies
from frontend.http.exchange import Exchange, Receive, Scope, Send
from frontend.http.server import HttpServer, Patience
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop")
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
STREAM = POST.replace(b"/ ", b"/?stream ", 1)
# Arrives in so few pieces that the server stops reading at the last one.
LONG = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + bytes(200_000)
# Long, so that what is served is served because of the drain's rules and not of a deadline.
PATIENT = Patience(request_s=PATIENCE_S, idle_s=PATIENCE_S, rest_s=PATIENCE_S, linger_s=0.0)
LINGERING = msgspec.structs.replace(PATIENT, linger_s=PATIENCE_S)


class Scene:
    """A server that counts its requests."""

    def __init__(self, patience: Patience = PATIENT, drain_timeout_s: float = PATIENCE_S) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.num_requests = self.num_gone = 0
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self._clients: list[asyncio.StreamWriter] = []
        self.server = HttpServer(self, drain_timeout_s, patience)
        self.server.start(self.listener)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the request's number when it may; `/?stream` begins before that."""
        exchange = Exchange(scope, receive, send)
        async with Bodies().received(exchange):
            self.num_requests += 1
        number, is_streamed = b"%d" % self.num_requests, exchange.query == "stream"
        await exchange.start(200, b"text/plain", [] if is_streamed else [(b"content-length", b"1")])
        begun = b"begun " if is_streamed else b""  # the head goes out
        await send({"type": "http.response.body", "body": begun, "more_body": True})
        await until(lambda: self.may_finish.is_set() or exchange.gone.done())
        self.num_gone += exchange.gone.done()
        await exchange.end(number)

    async def connect(self, first_bytes: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(first_bytes)
        self._clients.append(writer)
        return reader, writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
            with suppress(ConnectionError):
                await client.wait_closed()
        if self.listener.fileno() >= 0:
            await self.server.drain()

    @property
    def num_connections(self) -> int:
        return len(self.server.connections)


async def to_end(reader: asyncio.StreamReader) -> bytes:
    """What arrives until the server hangs up."""
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                found += data
    return found


@pytest.mark.parametrize("sent", [b"", GET[:1], GET[:-2]], ids=["nothing", "a byte", "almost all"])
async def test_a_connection_whose_first_request_comes_during_the_drain_is_served(sent: bytes) -> None:
    async with Scene(LINGERING) as scene:
        reader, writer = await scene.connect(sent)
        await until(lambda: scene.num_connections == 1)
        await asyncio.sleep(0)  # the server has read what was sent
        draining = asyncio.ensure_future(scene.server.drain())
        await until(lambda: scene.listener.fileno() < 0)
        writer.write(GET[len(sent) :])
        answer = await to_end(reader)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in answer.lower()
        assert answer.endswith(b"\r\n\r\n1")
        await draining


async def test_a_connection_that_waits_to_be_accepted_is_served() -> None:
    async with Scene(msgspec.structs.replace(PATIENT, linger_s=1.0)) as scene:
        with socket.create_connection(("127.0.0.1", scene.port)) as client:  # the loop does not run meanwhile
            client.sendall(GET)
            draining = asyncio.ensure_future(scene.server.drain())
            answer = await asyncio.to_thread(client.makefile("rb").read)
            assert answer.endswith(b"\r\n\r\n1")
            await draining


async def test_the_next_request_of_a_client_whose_answer_has_just_ended_is_served() -> None:
    async with Scene(LINGERING) as scene:
        reader, writer = await scene.connect(GET)
        assert (await reader.readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200")
        draining = asyncio.ensure_future(scene.server.drain())
        await until(lambda: scene.listener.fileno() < 0)
        await check_last_request(reader, writer)
        await draining


async def test_the_next_request_of_a_client_that_was_promised_more_is_served() -> None:
    async with Scene(LINGERING) as scene:
        scene.may_finish.clear()
        reader, writer = await scene.connect(GET)
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        draining = asyncio.ensure_future(scene.server.drain())
        await until(lambda: scene.listener.fileno() < 0)
        scene.may_finish.set()
        assert await reader.readexactly(1) == b"1"
        await check_last_request(reader, writer)
        await draining


async def check_last_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GET)
    answer = await to_end(reader)
    assert b"connection: close\r\n" in answer.lower()
    assert answer.endswith(b"\r\n\r\n2")


async def test_a_connection_that_was_idle_for_long_is_closed_at_once() -> None:
    async with Scene() as scene:
        reader, _ = await scene.connect(GET)
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readuntil(b"\r\n\r\n1")).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE_S / 2):  # a new connection would have twice as long
            await scene.server.drain()
        assert await to_end(reader) == b""


async def test_a_new_connection_that_asks_for_nothing_ends_the_drain_soon() -> None:
    async with Scene(Patience(linger_s=0.1, idle_s=PATIENCE_S)) as scene:
        reader, _ = await scene.connect()
        await until(lambda: scene.num_connections == 1)
        async with asyncio.timeout(PATIENCE_S / 2):  # an idle one would have twice as long
            await scene.server.drain()
        assert await to_end(reader) == b""
        assert scene.num_requests == 0


async def test_an_answer_that_does_not_end_ends_with_the_drains_time() -> None:
    async with Scene(drain_timeout_s=0.0) as scene:
        scene.may_finish.clear()
        reader, _ = await scene.connect(GET)
        await reader.readuntil(b"\r\n\r\n")
        await scene.server.drain()
        assert await to_end(reader) == b""


@pytest.mark.parametrize(
    "asked", [POST % b"1.1", STREAM % b"1.1", POST % b"1.0", LONG], ids=["whole", "streamed", "1.0", "long"]
)
async def test_a_client_that_closes_is_gone_before_its_answer_is_ready(asked: bytes) -> None:
    async with Scene() as scene:
        scene.may_finish.clear()
        _, writer = await scene.connect(asked)
        await until(lambda: scene.num_requests == 1)
        writer.close()
        await until(lambda: scene.num_gone == 1)


async def test_an_answer_to_head_ends_with_its_head() -> None:
    async with Scene() as scene:
        scene.may_finish.clear()
        reader, _ = await scene.connect(b"HEAD /?stream HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        async with asyncio.timeout(PATIENCE_S):
            heads = [await reader.readuntil(b"\r\n\r\n") for _ in range(2)]
        assert [head[:15] for head in heads] == [b"HTTP/1.1 200 OK"] * 2


async def test_a_client_that_ends_its_side_within_a_request_gets_nothing() -> None:
    async with Scene() as scene:
        reader, writer = await scene.connect((POST % b"1.1")[:-1])
        writer.write_eof()
        assert await to_end(reader) == b""


@pytest.mark.parametrize(("asked", "body"), [(POST, b"1"), (STREAM, b"begun 1")], ids=["whole", "streamed"])
async def test_an_answer_over_http_1_0_is_not_chunked_and_ends_with_the_connection(
    asked: bytes, body: bytes
) -> None:
    async with Scene() as scene:
        reader, _ = await scene.connect(asked % b"1.0")
        head, _, rest = (await to_end(reader)).partition(b"\r\n\r\n")
        assert rest == body
        assert b"chunked" not in head
        assert b"connection: close" in head


async def test_a_client_that_sends_requests_ahead_and_leaves_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Scene() as scene:
        scene.may_finish.clear()
        _, writer = await scene.connect(POST % b"1.1" * 2)
        await until(lambda: scene.num_requests == 1)
        writer.transport.abort()
        await until(lambda: scene.num_gone == 1)
    assert [record.name for record in caplog.records if record.levelname == "ERROR"] == []
