"""One HTTP connection, second by second: its app, its transport, and what the client says."""

import asyncio
import socket

import uvicorn
from uvicorn.server import ServerState

from baton.listener import ConnectionLimit
from frontend.http.exchange import Receive, Scope, Send
from frontend.http.server import Connection, Patience
from tests.waiting import until

PATIENCE = Patience(request_s=30.0, idle_s=1e6, unread_s=60.0, rest_s=5.0, linger_s=3.0)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"


class App:
    """Begins its answers when it may, and ends them when it may; it does not read bodies."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.may_begin = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        await self.may_begin.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"."})


class Pipe(asyncio.Transport):
    """Holds `unsent_bytes` until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent_bytes = 0
        self.closes = False
        self.is_aborted = False
        self.written = b""
        self.has_ended = False

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return self.unsent_bytes

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self.closes

    def abort(self) -> None:
        """See asyncio.Transport."""
        self.is_aborted = True

    def close(self) -> None:
        """See asyncio.Transport."""
        self.closes = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.Transport."""
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        """See asyncio.Transport."""
        return True

    def write_eof(self) -> None:
        """See asyncio.Transport."""
        self.has_ended = True

    def pause_reading(self) -> None:
        """See asyncio.Transport."""

    def resume_reading(self) -> None:
        """See asyncio.Transport."""


class Scene:
    """A connection to the app; seconds count from its beginning."""

    def __init__(self) -> None:
        self.app = App()
        config = uvicorn.Config(self.app, lifespan="off", log_config=None)
        config.load()
        limit = ConnectionLimit(1, Connection.evict)
        sock = socket.socket()
        sock.close()
        self.connection = Connection(config, ServerState(), PATIENCE, limit, sock)
        self.pipe = Pipe()
        self._begin_s = asyncio.get_running_loop().time()

    def say(self, data: bytes) -> None:
        self.connection.data_received(data)

    def check(self, second: float) -> None:
        self.connection.check(self._begin_s + second)

    async def answered(self) -> None:
        """Let the app answer, and wait for that."""
        self.app.may_begin.set()
        self.app.may_end.set()
        await until(lambda: self.pipe.written.endswith(b"\r\n\r\n."))

    @property
    def statuses(self) -> list[bytes]:
        return [part[:3] for part in self.pipe.written.split(b"HTTP/1.1 ")[1:]]


def connected() -> Scene:
    """A connection that has just been made."""
    scene = Scene()
    scene.connection.connection_made(scene.pipe)
    return scene
