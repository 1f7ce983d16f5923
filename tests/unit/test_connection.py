"""One HTTP connection, second by second, whose client reads slowly, sends slowly, or sends garbage."""

import asyncio
import socket

import pytest
import uvicorn
from uvicorn.server import ServerState

from baton.listener import ConnectionLimit
from frontend.http.exchange import Receive, Scope, Send
from frontend.http.server import MAX_HEAD_BYTES, Connection, Patience
from tests.clock import jumping
from tests.waiting import until

PATIENCE = Patience(request_s=30.0, idle_s=1e6, unread_s=60.0, rest_s=5.0, linger_s=3.0)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.closes = self.has_ended = False
        self.written = b""
        self.get_write_buffer_size = lambda: 0  # type: ignore[method-assign]  # a double
        self.is_closing = lambda: self.closes  # type: ignore[method-assign]  # a double
        self.can_write_eof = lambda: True  # type: ignore[method-assign]  # a double
        self.pause_reading = self.resume_reading = lambda: None  # type: ignore[method-assign]  # a double

    def close(self) -> None:
        self.closes = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.has_ended = True


class Scene:
    """A connection, and its app, which begins and ends its answers when it may and reads no bodies. Seconds
    count from its beginning."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()
        config = uvicorn.Config(self._answer, interface="asgi3", lifespan="off", log_config=None)
        config.load()
        sock = socket.socket()
        sock.close()
        limit = ConnectionLimit(1, Connection.evict)
        self.connection = Connection(config, ServerState(), PATIENCE, limit, sock)
        self.pipe = Pipe()
        self._begin_s = asyncio.get_running_loop().time()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_requests += 1
        self.headers = scope["headers"]
        await self.may_begin.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"."})

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def check(self, second: float) -> None:
        self.connection.check(self._begin_s + second)

    async def answered(self, num: int = 1) -> None:
        """Let the app answer, and wait for that."""
        self.may_begin.set()
        self.may_end.set()
        await until(lambda: self.pipe.written.count(b"\r\n\r\n.") == num)

    @property
    def statuses(self) -> list[bytes]:
        return [part[:3] for part in self.pipe.written.split(b"HTTP/1.1 ")[1:]]


def connected(first: bytes = b"") -> Scene:
    """A connection that has just been made, and checked."""
    scene = Scene()
    scene.connection.connection_made(scene.pipe)
    scene.check(0)
    scene.send(first)
    return scene


@jumping
async def test_a_request_may_come_slowly_while_the_client_waits_for_an_earlier_answer() -> None:
    scene = connected(GET + GET[:5])
    scene.check(1000)
    assert not scene.pipe.closes
    await scene.answered()


@pytest.mark.parametrize(
    "begun", [GET[:5], POST, POST + b"12345"], ids=["head", "no body", "part of the body"]
)
@jumping
async def test_a_request_that_began_before_the_last_answer_ended_has_a_deadline_too(begun: bytes) -> None:
    scene = connected(GET + begun)
    await until(lambda: scene.num_requests)
    scene.may_begin.set()
    scene.may_begin.clear()  # for the next one
    scene.may_end.set()
    await until(lambda: scene.pipe.written.endswith(b"\r\n\r\n."))
    scene.check(25)
    assert scene.statuses == [b"200"]
    scene.check(100)
    assert scene.statuses == [b"200", b"408"]


@jumping
async def test_a_client_that_is_answered_before_its_body_has_come_is_idle_afterwards() -> None:
    scene = connected(POST)
    await scene.answered()
    scene.send(b"1234567890")
    scene.check(100)
    assert not scene.pipe.closes
    scene.check(2e6)
    assert (scene.statuses, scene.pipe.closes) == ([b"200"], True)


@pytest.mark.parametrize(("bytes_a_s", "statuses"), [(128 << 10, []), (32 << 10, [b"408"])])
@jumping
async def test_a_large_body_gets_the_time_it_needs_and_no_more(bytes_a_s: int, statuses: list[bytes]) -> None:
    """Twice the rate that is asked for, and half of it."""
    scene = connected(POST.replace(b"10", b"%d" % (10 << 20)))
    for second in range(1, 70):
        scene.send(bytes(bytes_a_s))
        scene.check(second)
    assert scene.statuses == statuses


@jumping
async def test_what_comes_after_a_refused_head_is_not_read() -> None:
    scene = connected(b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
    scene.send(b"\r\n\r\n")
    for _ in range(20):
        await asyncio.sleep(0)  # turns for what must not happen
    assert (scene.num_requests, scene.statuses, scene.pipe.has_ended) == (0, [b"431"], True)


async def test_trailers_are_no_headers() -> None:
    scene = connected(
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-api-key: of another\r\n\r\n"
    )
    await scene.answered()
    assert scene.headers == [(b"transfer-encoding", b"chunked")]
