"""Real sockets whose clients close the connection, or speak HTTP/1.0."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from frontend.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from frontend.http.server import HttpServer
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop")
HEAD = b"POST / HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"
STREAM = HEAD.replace(b"/ ", b"/?stream ", 1)


class Slow:
    """Answers when it may: with the body, or with a stream that begins before that."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.num_running = self.num_gone = self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        exchange = Exchange(scope, receive, send)
        body = await exchange.read_body(100)
        self.num_requests += 1
        try:
            await self._answer(exchange, body)
        except ClientGone:
            self.num_gone += 1
        finally:
            self.num_running -= 1

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        is_streamed = exchange.query == "stream"
        if is_streamed:
            await exchange.start(200, b"text/plain", [])
            await exchange.write(b"begun ")

        await until(lambda: self.may_end.is_set() or exchange.gone.done())
        if exchange.gone.done():
            raise ClientGone
        if not is_streamed:
            await exchange.start(200, b"text/plain", [(b"content-length", b"%d" % len(body))])
        await exchange.end(body)


class Peer:
    """A client, and its app."""

    def __init__(self, app: Slow, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.app = app
        self.writer = writer
        self._reader = reader

    async def ask(self, request: bytes) -> None:
        num_before = self.app.num_requests
        self.writer.write(request)
        await until(lambda: self.app.num_requests > num_before)

    async def rest(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read()


@asynccontextmanager
async def serving() -> AsyncIterator[Peer]:
    app = Slow()
    server = HttpServer(app, 1.0)
    listener = socket.create_server(("127.0.0.1", 0))
    server.start(listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        yield Peer(app, reader, writer)
    finally:
        writer.close()
        await server.drain()


@pytest.mark.parametrize(
    "request_", [HEAD % b"1.1", STREAM % b"1.1", HEAD % b"1.0"], ids=["whole", "streamed", "1.0"]
)
async def test_a_client_that_closes_is_gone_before_its_answer_is_ready(request_: bytes) -> None:
    async with serving() as peer:
        await peer.ask(request_)
        peer.writer.close()
        await until(lambda: peer.app.num_gone == 1)


async def test_a_client_that_ends_its_side_within_a_request_gets_nothing() -> None:
    async with serving() as peer:
        peer.writer.write((HEAD % b"1.1")[:-1])
        peer.writer.write_eof()
        assert await peer.rest() == b""


@pytest.mark.parametrize(
    ("request_", "body"), [(HEAD, b"ab"), (STREAM, b"begun ab")], ids=["whole", "streamed"]
)
async def test_an_answer_over_http_1_0_is_not_chunked_and_ends_with_the_connection(
    request_: bytes, body: bytes
) -> None:
    async with serving() as peer:
        peer.app.may_end.set()
        await peer.ask(request_ % b"1.0")
        head, _, rest = (await peer.rest()).partition(b"\r\n\r\n")
        assert rest == body
        assert b"chunked" not in head
        assert b"connection: close" in head
