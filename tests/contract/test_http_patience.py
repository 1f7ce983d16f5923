"""Real sockets with clients that are slow, endless, too many, or do not speak HTTP: all are disconnected."""

import asyncio
import functools
import json
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import cast

import pytest

from baton.messages import GenerateRequest, TokenChunk, Usage
from baton.tls import server_context
from frontend.chat import OPERATIONS as CHAT
from frontend.http.body import Bodies
from frontend.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from frontend.http.respond import Endpoint, Services
from frontend.http.server import MAX_HEAD_BYTES, MAX_PIPELINED, Connection, HttpServer, Patience
from frontend.record import Leg
from tests.alive import Newborn
from tests.certificates import Authority
from tests.scripted_frontend import MODEL, TOKENIZER, Client, ScriptedTokens
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop")
MAX_BODY_BYTES = 1 << 20
HURRIED = Patience(request_s=0.5, idle_s=1.5, unread_s=0.5, rest_s=0.3)
PATIENT = Patience(request_s=3 * PATIENCE_S, idle_s=3 * PATIENCE_S, unread_s=3 * PATIENCE_S)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Echo:
    """An app of one route: returns the body's length or, for `/endless`, an endless answer."""

    def __init__(self) -> None:
        self.services = Client(ScriptedTokens()).services
        self.num_running = 0
        self.num_answered = 0
        self._endpoint = Endpoint("/", dict.fromkeys(("GET", "POST"), self._serve), self.services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        try:
            await self._endpoint(scope, receive, send)
        finally:
            self.num_running -= 1

    async def _serve(self, exchange: Exchange, *_: object) -> None:
        async with Bodies(max_body_bytes=MAX_BODY_BYTES).received(exchange) as body:
            num_bytes = b"%d" % len(body)
        if exchange.query != "endless":
            await exchange.start(200, b"text/plain", [(b"content-length", b"%d" % len(num_bytes))])
            await exchange.end(num_bytes)
            self.num_answered += 1
            return
        await exchange.start(200, b"text/plain", [])
        while not exchange.gone.done():
            await exchange.send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)  # like an engine, whose replies go to several clients
        raise ClientGone


class Peer:
    """A client that sends arbitrary bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def mute(self) -> None:
        """Stop reading."""
        cast("asyncio.Transport", self.writer.transport).pause_reading()

    def unmute(self) -> None:
        """Read again."""
        cast("asyncio.Transport", self.writer.transport).resume_reading()

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        found = b""
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):  # a reset is an end too
                while data := await self.reader.read(1 << 16):
                    found += data
        return found

    async def answer(self) -> bytes:
        """The next answer's body."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            assert b"\r\nserver:" not in head.lower()
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
            return await self.reader.readexactly(int(length.partition(b":")[2]))


class Scene:
    """A server with short deadlines, and its clients, which use TLS if there is an authority."""

    def __init__(self, app: Echo, port: int, authority: Authority | None) -> None:
        self.app = app
        self.port = port
        self._tls = authority and authority.client()
        self.peers: list[Peer] = []

    async def peer(self, first_bytes: bytes = b"") -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)
        self.peers.append(Peer(reader, writer))
        self.peers[-1].say(first_bytes)
        return self.peers[-1]


@asynccontextmanager
async def serving(
    authority: Authority | None, patience: Patience = HURRIED, max_connections: int | None = None
) -> AsyncIterator[Scene]:
    app = Echo()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    context = None if authority is None else server_context(*authority.sign("server"))
    server = HttpServer(app, 1.0, patience, max_connections, lambda: context)
    scene = Scene(app, listener.getsockname()[1], authority)
    server.start(listener)
    try:
        yield scene
    finally:
        for peer in scene.peers:
            peer.writer.transport.abort()
        await server.drain()
        await until(lambda: app.num_running == 0)


Serve = Callable[..., AbstractAsyncContextManager[Scene]]


@pytest.fixture(autouse=True)
def _checked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.http.server._CHECK_EVERY_S", 0.1)


@pytest.fixture(scope="module", params=["http", "https"])
def serve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server, over TLS or not."""
    authority = Authority(tmp_path_factory.mktemp("tls")) if request.param == "https" else None
    return functools.partial(serving, authority)


def error_code(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def drip(peer: Peer, data: bytes = b"a", every_s: float = 0.05) -> bytes:
    """Send a byte now and then until the server closes; returns what it sent."""
    answer = asyncio.ensure_future(peer.rest())
    while not answer.done():
        peer.say(data)
        await asyncio.wait({answer}, timeout=every_s)  # the pace of a slow client
    return answer.result()


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nx: ",
        b"POST / HTTP/1.1\r\ncontent-length: 100000\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffff\r\n",
    ],
    ids=["headers", "body", "chunk"],
)
async def test_a_request_that_comes_by_drops_is_a_408(serve: Serve, start: bytes) -> None:
    async with serve() as scene:
        assert error_code(await drip(await scene.peer(start))) == (408, "request_timeout")


async def test_a_request_that_is_refused_in_its_body_ends_before_its_connection(serve: Serve) -> None:
    async with serve(Patience(request_s=0.2, rest_s=60.0)) as scene:
        await scene.peer(b"POST / HTTP/1.1\r\ncontent-length: 100000\r\n\r\n")
        await until(lambda: scene.app.num_running == 1)
        await until(lambda: scene.app.num_running == 0)


async def test_an_idle_connection_is_closed_silently_and_an_active_one_is_kept(serve: Serve) -> None:
    async with serve() as scene:
        silent, used, asking = [await scene.peer() for _ in range(3)]
        used.say(GET)
        assert await used.answer() == b"0"
        closed = asyncio.gather(silent.rest(), used.rest())
        while not closed.done():
            asking.say(GET)
            assert await asking.answer() == b"0"
            await asyncio.wait({closed}, timeout=0.1)  # the pace of an active client
        assert [*closed.result()] == [b"", b""]
        asking.say(GET)
        assert await asking.answer() == b"0"


async def test_a_client_that_does_not_read_its_answer_is_dropped(serve: Serve) -> None:
    async with serve() as scene:
        peer = await scene.peer()
        peer.mute()
        peer.say(b"GET /?endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: scene.app.num_running == 1)
        await until(lambda: scene.app.num_running == 0)


class UntilBlocked(ScriptedTokens):
    """An answer that ends once its client did not read for a while."""

    num_sent = 0

    async def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None], leg: Leg
    ) -> AsyncGenerator[TokenChunk, None]:
        on_taken()
        leg.answered(TokenChunk((0,), None))
        header = TOKENIZER.encode_text("<|channel|>final<|message|>", allow_special=True)
        yield TokenChunk(tuple(header))
        while "send" not in leg.attempts[0].stages:
            await asyncio.sleep(0)  # like an engine, whose replies go to several clients
            self.num_sent += 1
            yield TokenChunk((40,) * 100)
        leg.end()
        yield TokenChunk((), "length", Usage(len(request.token_ids), 0, 1))


@asynccontextmanager
async def chat(tokens: ScriptedTokens, *, stream: bool) -> AsyncIterator[tuple[Peer, Services]]:
    """A client that has asked and does not read; buffers are small."""
    services = Client(tokens).services
    listener, own = socket.create_server(("127.0.0.1", 0)), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections' too
    (operation,) = CHAT.values()
    assert operation.serve is not None
    server = HttpServer(Endpoint("/", {"POST": operation.serve}, services), 1.0)
    server.start(listener)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    own.connect(listener.getsockname())
    reader, writer = await asyncio.open_connection(sock=own)
    peer = Peer(reader, writer)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    body, head = json.dumps(asked).encode(), b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    peer.mute()
    peer.say(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    yield peer, services
    writer.transport.abort()
    await server.drain()


async def test_what_a_client_does_not_read_is_no_gap_between_tokens() -> None:
    tokens, num_sent = UntilBlocked(), -1
    async with chat(tokens, stream=True) as (peer, services):
        await until(lambda: tokens.num_sent > 0)
        while num_sent != (num_sent := tokens.num_sent):
            await asyncio.sleep(0.5)  # until all buffers are full
        await asyncio.sleep(1.0)  # it does not read
        peer.unmute()
        assert b"[DONE]" in await peer.rest()
    (record,) = services.metrics.records.newest(9)
    assert record.status == 200
    (leg,) = record.legs
    assert leg.gap_s < leg.attempts[0].stages["send"]
    assert record.duration_s == pytest.approx(sum(record.spent().values()), rel=0.05)


class Long(ScriptedTokens):
    """An answer that is longer than the buffers."""

    async def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None], leg: Leg
    ) -> AsyncGenerator[TokenChunk, None]:
        on_taken()
        leg.answered(TokenChunk((0,), None))
        header = TOKENIZER.encode_text("<|channel|>final<|message|>", allow_special=True)
        yield TokenChunk((*header, *(40,) * 300_000), "length", Usage(len(request.token_ids), 0, 1))


async def test_a_whole_answer_is_sent_until_the_client_has_read_it() -> None:
    async with chat(Long(), stream=False) as (peer, services):
        await until(lambda: [each.stage for each in services.metrics.records.running()] == ["send"])
        await asyncio.sleep(0.5)  # it does not read
        peer.unmute()
        assert len(await peer.rest()) > 300_000
    (record,) = services.metrics.records.newest(9)
    assert (record.status, record.stages["send"] > 0.5) == (200, True)


async def test_a_client_that_reads_slowly_or_asked_ahead_is_not(serve: Serve) -> None:
    async with serve(Patience(request_s=0.5, idle_s=0.5, unread_s=1.0)) as scene:
        peer = await scene.peer(GET + b"GET /?endless HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await peer.answer() == b"0"
        for _ in range(20):
            await peer.reader.readexactly(1 << 20)
            await asyncio.sleep(0.1)  # the pace of a slow client
        assert scene.app.num_running == 1


CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
GARBAGE, TOO_LARGE = (400, "invalid_request"), (431, "headers_too_large")


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (bytes(range(256)), GARBAGE),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), GARBAGE),
        (b"GET / HTTP/9.9\r\n\r\n", GARBAGE),
        (b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n", GARBAGE),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", GARBAGE),
        (CHUNKED + b"xyz\r\n", GARBAGE),
        (b"GET /\xff HTTP/1.1\r\n\r\n", GARBAGE),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1), TOO_LARGE),
        (b"GET /" + b"a" * (MAX_HEAD_BYTES + 1), TOO_LARGE),
        (CHUNKED + b"1;" + b"x" * 200_000, TOO_LARGE),
        (CHUNKED + b"0\r\nx: " + b"y" * 200_000, TOO_LARGE),
    ],
    ids=["bytes", "TLS", "version", "negative length", "two lengths", "chunk", "path",
         "endless header", "endless path", "endless extension", "endless trailer"],
)  # fmt: skip
async def test_garbage_and_what_has_no_end_is_refused(
    serve: Serve, sent: bytes, expected: tuple[int, str]
) -> None:
    async with serve(Patience(request_s=3 * PATIENCE_S, rest_s=0.3)) as scene:
        assert error_code(await (await scene.peer(sent)).rest()) == expected


@pytest.mark.parametrize("size", [b"content-length: 99999999", b"transfer-encoding: chunked"])
async def test_a_body_over_the_limit_is_a_413_and_its_rest_is_not_read_for_long(
    serve: Serve, size: bytes
) -> None:
    async with serve(Patience(request_s=60, rest_s=0.3)) as scene:
        peer = await scene.peer(b"POST / HTTP/1.1\r\n" + size + b"\r\n\r\n")
        chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
        answer = await drip(peer, chunk, every_s=0.01)
        assert answer.startswith(b"HTTP/1.1 413")


async def test_requests_sent_ahead_are_answered_in_order_but_not_any_number_of_them(serve: Serve) -> None:
    async with serve() as scene:
        few = await scene.peer(GET * MAX_PIPELINED)
        assert [await few.answer() for _ in range(MAX_PIPELINED)] == [b"0"] * MAX_PIPELINED
        many = await scene.peer(GET * 10_000)
        assert (await many.rest()).count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1


async def test_clients_that_reset_their_connections_leave_nothing_behind(serve: Serve) -> None:
    connections = Newborn(Connection)
    async with serve() as scene:
        for _ in range(5):
            peer = await scene.peer(GET)
            assert await peer.answer() == b"0"
            sock = peer.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.writer.transport.abort()
        await until(lambda: connections.count() == 0, 30.0, pause_s=0.1)


async def test_garbage_after_a_request_ends_the_connection_and_not_the_server(serve: Serve) -> None:
    async with serve() as scene:
        peer = await scene.peer(b"GET /?endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await peer.reader.readexactly(100)
        peer.say(b"\x00\xff")
        assert b"HTTP/1.1 400" not in await peer.rest()
        await until(lambda: scene.app.num_running == 0)


async def test_all_but_the_reserved_descriptors_are_for_clients(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.http.server.RESERVED_DESCRIPTORS", 2)
    monkeypatch.setattr("baton.listener.resource.getrlimit", lambda _: (16, 16))
    async with serve(PATIENT) as scene:
        for _ in range(14):
            await scene.peer(b"GET /?endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: scene.app.num_running == 14)
        with suppress(ConnectionError):  # of the TLS handshake
            assert await (await scene.peer(GET)).rest() == b""
        scene.peers[0].writer.transport.abort()
        await until(lambda: scene.app.num_running == 13)
        assert await (await scene.peer(GET)).answer() == b"0"


async def test_the_longest_waiting_connection_makes_room(serve: Serve) -> None:
    async with serve(PATIENT, max_connections=3) as scene:
        streaming = await scene.peer(b"GET /?endless HTTP/1.1\r\nhost: x\r\n\r\n")
        oldest = await scene.peer(b"POST / HTTP/1.1\r\n")
        asking = await scene.peer(GET)
        assert await asking.answer() == b"0"
        assert await (await scene.peer(GET)).answer() == b"0"
        assert await oldest.rest() == b""
        asking.say(GET)
        assert await asking.answer() == b"0"
        await streaming.reader.readexactly(1 << 20)


async def test_a_client_that_does_not_read_makes_room_too(serve: Serve) -> None:
    async with serve(PATIENT, max_connections=3) as scene:
        for _ in range(10):
            peer = await scene.peer()
            peer.mute()
            peer.say(GET)
        await until(lambda: scene.app.num_answered == 10)
        assert await (await scene.peer(GET)).answer() == b"0"
