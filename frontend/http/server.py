"""The HTTP server: limits connections, enforces their timeouts, drains on shutdown."""

import asyncio
import enum
import logging
import math
import socket
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import cast

import httptools
import msgspec
import uvicorn
from uvicorn._types import ASGI3Application, ASGIReceiveEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.errors import BatonError, InvalidRequest
from baton.listener import ConnectionLimit, Listener, Tls, num_connections
from baton.pace import Pulse
from frontend.http.exchange import AsgiApp, ErrorBody, Headers, Message, Scope

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Limit of the request line and headers, and of framing bytes between two parts of a body."""
MAX_PIPELINED = 8
"""Requests that a client may pipeline."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a connection.

    `request_s`: from the first byte of a request to the last, plus a second for each `bytes_a_s` of body.
    `idle_s`: between requests, and before the first. `unread_s`: without the client reading any data.
    `rest_s`: for discarding the rest of a request that was answered early. `linger_s`: at a drain, for the
    next request of a new client, or of one whose answer did not announce that the connection closes."""

    request_s: float = 30.0
    bytes_a_s: int = 64 << 10
    idle_s: float = 75.0
    unread_s: float = 60.0
    rest_s: float = 2.0
    linger_s: float = 2.0


class RequestTooSlow(InvalidRequest, code="request_timeout", status=408):
    """The request did not arrive within the timeout."""


class HeadTooLarge(InvalidRequest, code="headers_too_large", status=431):
    """The headers exceed the size limit."""


class _Cycle(RequestResponseCycle):
    """A request, whose `send` writes the head of the answer together with the first part of the body: one
    system call and one packet. HTTP/1.0 has no chunks: the end of the connection ends an answer without a
    length."""

    _head = b""

    async def receive(self) -> ASGIReceiveEvent:
        """Reading goes on after a long body: else the end of the connection is not seen."""
        message = await super().receive()
        self.flow.resume_reading()
        return message

    async def send(self, message: Message) -> None:  # type: ignore[override]  # uvicorn's is narrower
        if self.flow.write_paused and not self.disconnected:
            began_s = time.perf_counter()
            await self.flow.drain()
            cast("Scope", self.scope)["blocked_s"].append(time.perf_counter() - began_s)
        is_head = self.scope["method"] == "HEAD"
        if self.disconnected or (is_head and self.response_complete):
            return
        assert not self.response_complete, "the answer has ended"
        if not self.response_started:
            self.response_started, self.waiting_for_100_continue = True, False
            self._head = self._begin(message["status"], message["headers"])
            return
        body, is_last = message["body"], not message.get("more_body", False)
        if is_head:  # of a stream, too: the next request waits for the end
            body, is_last = b"", True
        elif self.chunked_encoding:
            end = b"0\r\n\r\n" if is_last else b""
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        self.transport.write(self._head + body)
        self._head = b""
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _begin(self, status: int, headers: Headers) -> bytes:
        lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % header for header in headers]]
        given = dict(headers)
        if b"connection" in given:  # it is `close`
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if b"content-length" not in given and self.scope["http_version"] != "1.0" and status != 304:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        return b"".join(lines) + b"\r\n"


class _Reading(enum.Enum):
    """Which part of a request is expected next; nothing more is read of a refused client."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    REFUSED = enum.auto()


class Connection(HttpToolsProtocol):
    """Counts as idle in its `limit` unless a complete request is being answered."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        patience: Patience,
        limit: "ConnectionLimit[Connection]",
        sock: socket.socket,
    ) -> None:
        """`sock` is the connection before it has a transport."""
        super().__init__(config, state, {})
        self.limit = limit
        self._sock = sock
        self._patience = patience
        self._gone: asyncio.Future[None] = self.loop.create_future()
        self._reading = _Reading.NOTHING
        self._is_last = False  # the next request, or this one
        self._since_s = 0.0  # without a request, or since its last answer
        self._give_up_s = math.inf
        self._num_odd_bytes = 0  # since the last progress
        self._running: RequestResponseCycle | None = None  # the last that was begun; `cycle` may be behind it

    @property
    def _num_open(self) -> int:
        """Requests whose headers were read and whose answer is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return len(self.pipeline) + (cycle is not None and not cycle.response_complete)

    def evict(self) -> None:
        """Drop the connection now, to make room for another client."""
        transport = cast("asyncio.Transport | None", self.transport)
        if transport is not None:
            transport.abort()
        else:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # which ends the TLS handshake, or the connection

    def check(self, now_s: float) -> None:
        """Close the connection if a timeout has passed. Call about once a second."""
        if now_s <= self._give_up_s:
            return
        if self._reading in (_Reading.HEAD, _Reading.BODY):
            self._refuse(RequestTooSlow("The request did not arrive within the timeout."))
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._since_s = self.loop.time()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.leave(self)
        self._gone.set_result(None)
        if isinstance(exc, TimeoutError):
            log.info("dropped client=%s reason=client does not read the response", self.client)
        if self._running is not None:
            self._running.disconnected = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, within the header limit: the parser itself has none."""
        if self._reading is _Reading.REFUSED:
            return
        self._num_odd_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._reading is _Reading.BODY:  # else of a request behind another offer, which is not read
                self._ignore_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("Invalid HTTP request received. Send HTTP/1.1."))
        if self._num_odd_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The headers exceed the limit of {MAX_HEAD_BYTES} bytes."))

    def _ignore_offer(self, rest: bytes) -> None:
        """The library takes what follows a head with `Upgrade` (or `CONNECT`) for another protocol. Here it
        is the body, which another parser reads, and the last of this connection: Java's client and `curl
        --http2` offer HTTP/2 with their first POST."""
        self.cycle.keep_alive = False
        body = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self.parser = httptools.HttpRequestParser(body)
        framing = [b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in _FRAMING]
        self.data_received(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope = cast("Scope", self.scope)
        scope["blocked_s"], scope["drain"], scope["gone"] = [], self.flow.drain, self._gone
        self._reading = _Reading.HEAD
        self._expect()

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind an earlier one."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser reports it as a 400
        super().on_headers_complete()
        self.cycle.__class__ = _Cycle  # uvicorn has no other way
        if self._is_last:
            self.cycle.keep_alive = False
        self._reading = _Reading.BODY
        self._num_odd_bytes = 0
        self.headers = []  # of trailers, which must not change what the request is

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Extend the timeout by the part of the body that arrived."""
        if self._reading is not _Reading.BODY:  # behind a request with an offer
            return
        super().on_body(body)
        self._num_odd_bytes = 0
        if self._num_open > 0:
            self._give_up_s += len(body) / self._patience.bytes_a_s

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        self._expect()

    def on_response_complete(self) -> None:
        """The last byte of a response was handed to the transport. Replaces uvicorn's, whose timer for idle
        connections would keep a reset one in memory until it fires."""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._since_s = self.loop.time()
        self._expect()

    def shutdown(self) -> None:
        """Close after the current request or, if no answer announced it, after the next one, which has to
        begin within `linger_s`."""
        self._is_last = True
        if self._num_open > 0:
            if not self.cycle.response_started:
                self.cycle.keep_alive = False
        elif self._reading is not _Reading.HEAD:
            self._give_up_s = self._since_s + self._patience.linger_s
            if self.loop.time() >= self._give_up_s:
                self.transport.close()

    def _expect(self) -> None:
        """Restart the timeout for what the client has to send; there is none while it waits for an answer."""
        reading, patience, num_open = self._reading, self._patience, self._num_open
        if num_open > (reading is _Reading.BODY or reading is _Reading.REFUSED):
            self._give_up_s = math.inf
            self.limit.busy(self)
            return
        if reading is _Reading.NOTHING:
            limit_s = patience.linger_s if self._is_last else patience.idle_s
        elif reading is _Reading.HEAD or (num_open and reading is _Reading.BODY):
            limit_s = patience.request_s
        else:  # refused, or already answered
            limit_s = patience.rest_s
        self._give_up_s = self.loop.time() + limit_s
        self.limit.wait(self)

    def _refuse(self, error: BatonError) -> None:
        """Close the connection, after an error response if one can still be sent.

        Incoming data is discarded for `rest_s`, so that the response reaches a client that is still sending.
        """
        if self._reading is _Reading.REFUSED:
            return
        is_body = self._reading is _Reading.BODY
        may_answer = self._num_open == is_body and not (is_body and self.cycle.response_started)
        self._reading = _Reading.REFUSED
        log.info("refused client=%s status=%d reason=%s", self.client, error.status, error.message)
        if not may_answer:
            self.transport.close()
        elif not self.transport.is_closing():
            body = msgspec.json.encode(ErrorBody.of(error))
            headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
            self.transport.write(b"%b%b\r\n\r\n%b" % (STATUS_LINE[error.status], headers, body))
            if self.transport.can_write_eof():  # not over TLS
                self.transport.write_eof()
            self._expect()
            if is_body:  # the app waits for it
                self.cycle.disconnected = True
                self.cycle.message_event.set()


MOST_CONNECTIONS = 16_384
RESERVED_DESCRIPTORS = 2048
"""For workers and files."""
_CHECK_EVERY_S, _DRAINED_EVERY_S = 1.0, 0.05


class HttpServer:
    """Serves the app on a listening socket. By default, clients may use half of the process's file
    descriptors, or all but RESERVED_DESCRIPTORS."""

    def __init__(
        self,
        app: AsgiApp,
        drain_timeout_s: float,
        patience: Patience | None = None,
        max_connections: int | None = None,
        tls: Tls = lambda: None,
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
        )
        self._config.load()
        self._state = ServerState()
        self._drain_timeout_s = drain_timeout_s
        self._patience = patience or Patience()
        most = max_connections or num_connections(2, MOST_CONNECTIONS, reserve=RESERVED_DESCRIPTORS)
        self._admitted = ConnectionLimit(most, Connection.evict)
        self._is_full = False
        self._tls = tls
        self._listener: Listener | None = None
        self._pulse: Pulse | None = None

    @property
    def connections(self) -> tuple[Connection, ...]:
        return cast("tuple[Connection, ...]", tuple(self._state.connections))

    def start(self, listener: socket.socket, *, is_shared: bool = False) -> None:
        """Accept connections until `drain`; `is_shared`: other processes accept on the socket too."""
        unread_ms = round(self._patience.unread_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)  # connections inherit it
        num_open = self._admitted.__len__ if is_shared else None
        self._listener = Listener(listener, self._take, self._admitted.make_room, self._tls, num_open)
        self._pulse = Pulse(_CHECK_EVERY_S, self._check)

    async def drain(self) -> None:
        """Stop accepting connections, and let running answers finish within the drain timeout."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.settled()
        for connection in self.connections:
            connection.shutdown()
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while self._state.connections or self._state.tasks:  # noqa: ASYNC110  uvicorn's sets
                    await asyncio.sleep(_DRAINED_EVERY_S)
        except TimeoutError:
            log.warning("drain timeout, cancelled answers=%d", len(self._state.tasks))
            for task in self._state.tasks:
                task.cancel()
        if self._pulse is not None:
            self._pulse.stop()

    def _take(self, sock: socket.socket) -> Connection | None:
        connection = Connection(self._config, self._state, self._patience, self._admitted, sock)
        is_full = not self._admitted.enter(connection)
        if is_full != self._is_full:
            self._is_full = is_full
            log.warning("connections=%s", "full" if is_full else "room again")
        if is_full:
            sock.close()
            return None
        return connection

    def _check(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for connection in self.connections:
            connection.check(now_s)
