"""One client connection: uvicorn's HTTP protocol with timeouts and size limits."""

import asyncio
import enum
import logging
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.errors import BatonError, InvalidRequest
from baton.listener import ConnectionLimit
from frontend.http.errors import ErrorBody
from frontend.http.exchange import Message, Receive, Scope, Send

log = logging.getLogger(__name__)


class JoinedHead(asyncio.Transport):
    """uvicorn writes a response's head and body one after the other, and uvloop sends each at once: two
    system calls and two packets for a short answer. Here the head waits for the body, within one iteration
    of the event loop.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio.Transport."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data[:9] == b"HTTP/1.1 ":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        """See asyncio.Transport."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """See asyncio.Transport."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """See asyncio.Transport."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """See asyncio.Transport."""
        return self._transport.is_closing()

    def can_write_eof(self) -> bool:
        """See asyncio.Transport."""
        return self._transport.can_write_eof()

    def get_write_buffer_size(self) -> int:
        """See asyncio.Transport."""
        return self._transport.get_write_buffer_size()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Parser:
    """An `httptools.HttpRequestParser` for uvicorn's protocol.

    The library takes what follows the head of a request with `Upgrade` (or `CONNECT`) for another protocol.
    Here it is the body and then the next request: Java's client and `curl --http2` offer h2c with their
    first POST.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)

    def get_http_version(self) -> str:
        """See httptools."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """See httptools."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """See httptools."""
        return self._parser.should_keep_alive()

    def feed_data(self, data: bytes) -> None:
        """Parse data. Raises httptools.HttpParserError."""
        while data:
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.skips_body():
                    self._begin_body()

    def should_upgrade(self) -> bool:
        """False."""
        return False

    def skips_body(self) -> bool:
        """Whether the library takes the current request, whose head is complete, for one without a body."""
        framing = [pair for pair in self._protocol.headers if pair[0] in _FRAMING]
        return self._parser.should_upgrade() and any(value.strip(b"0") for _, value in framing)

    def _begin_body(self) -> None:
        """Continue with a parser that has read a head with the same body, but without `Upgrade`."""
        framing = [name + b": " + value for name, value in self._protocol.headers if name in _FRAMING]
        muted = _Muted(self._protocol)
        self._parser = _parser(muted)
        self._parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        muted.is_muted = False


def _parser(protocol: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: it is not read
    return parser


class _Muted:
    """Passes a parser's calls on to the protocol, unless it is muted."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self.is_muted = True
        self._protocol = protocol

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = getattr(self._protocol, name)

        def called(*given: bytes) -> None:
            if not self.is_muted:
                call(*given)

        return called


def unchunked(cycle: RequestResponseCycle, app: Any) -> Any:  # their types are uvicorn's
    """The app, whose answers `cycle` writes without chunks."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        cycle.chunked_encoding = False

        async def whole(message: Message) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, whole)

    return run


MAX_HEAD_BYTES = 64 << 10
"""Limit of the request line and headers, and of framing bytes between two parts of a body."""
MAX_PIPELINED = 8
"""Requests that a client may pipeline."""
_PROBE_S, _MAX_PROBE_S = 0.25, 2.0
"""How often a client that sends no more is written to, at first and later."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of a connection.

    `request_s`: from the first byte of a request to the last, plus a second for each `bytes_a_s` of body.
    `idle_s`: between requests, and before the first. `unread_s`: without the client reading any data.
    `rest_s`: for discarding the rest of a request that was answered early, and at a drain for the first
    request of a new connection. `linger_s`: at a drain, for the next request of a client that was not told
    that its connection will be closed.
    """

    request_s: float = 30.0
    bytes_a_s: int = 64 << 10
    idle_s: float = 75.0
    unread_s: float = 60.0
    rest_s: float = 2.0
    linger_s: float = 1.0


class RequestTooSlow(BatonError):
    """The request did not arrive within the timeout."""

    code = "request_timeout"
    status = 408
    kind = "invalid_request_error"


class HeadTooLarge(BatonError):
    """The headers exceed the size limit."""

    code = "headers_too_large"
    status = 431
    kind = "invalid_request_error"


class _Reading(enum.Enum):
    """Which part of a request is expected next."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class Connection(HttpToolsProtocol):
    """Counts as idle in its admission unless a complete request is being answered."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        patience: Patience,
        sock: socket.socket | None = None,
    ) -> None:
        """`sock` is the connection before it has a transport."""
        super().__init__(config, state, {})
        self._parser = Parser(self)
        self.parser = cast("httptools.HttpRequestParser", self._parser)
        self._sock = sock
        self._patience = patience
        self._admission: ConnectionLimit[Connection] | None = None
        self._is_evicted = False
        self._is_refused = False
        self._is_new = True  # no request has begun
        self._is_last = False  # the next request, or this one
        self._since_s = 0.0  # without a request, or since its last answer
        self._reading = _Reading.NOTHING
        self._num_open = 0  # requests whose headers were read and whose answer is not complete
        self._num_odd_bytes = 0  # since the last progress
        self._give_up_s = math.inf
        self._unsent_bytes = 0
        self._taken_s = 0.0

    def enter(self, admission: ConnectionLimit["Connection"]) -> bool:
        """Join the admission until the connection is lost; False if it is full."""
        if not admission.enter(self):
            return False
        self._admission = admission
        return True

    def evict(self) -> None:
        """Drop the connection now, to make room for another client."""
        self._is_evicted = True
        transport = cast("asyncio.Transport | None", self.transport)  # uvicorn's type leaves the start out
        if transport is not None:
            transport.abort()
        elif self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # which ends the TLS handshake

    def check(self, now_s: float) -> None:
        """Close the connection if a timeout has passed. Call about once a second."""
        if self._takes_nothing(now_s):
            log.info("dropped client=%s reason=client does not read the response", self.client)
            self.transport.abort()
        elif now_s <= self._give_up_s:
            return
        elif self._reading is _Reading.NOTHING or self._is_refused:
            self.transport.close()
        else:
            self._refuse(RequestTooSlow("The request did not arrive within the timeout."))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the idle timeout."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport = JoinedHead(self.transport)
        self._since_s = self.loop.time()
        self._wait(self._patience.idle_s)
        if self._is_evicted:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the admission."""
        if self._admission is not None:
            self._admission.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, within the header limit: the parser itself has none."""
        if self._is_refused:
            return
        self._num_odd_bytes += len(data)
        super().data_received(data)
        if self._num_odd_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The headers exceed the limit of {MAX_HEAD_BYTES} bytes."))

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio allows it
        """The client has closed the connection, or only its side (not over TLS) and waits for its answer:
        both look the same until something is written. Returns whether to keep our side open.
        """
        is_asking = self._num_open > 0 and self._reading is _Reading.NOTHING
        # HTTP/1.0 has no interim responses.
        if not is_asking or self.scope["http_version"] != "1.1" or not self.transport.can_write_eof():
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(_PROBE_S, self._probe, _PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        """Write what the client skips, so that a closed one answers with a reset, which ends the request."""
        if self._num_open == 0 or self.transport.is_closing():
            return
        if self._num_open == 1:  # else the next answer is written soon
            if not self.cycle.response_started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.cycle.message_event.set()  # to the app a part of the body without bytes
        self.loop.call_later(next_s, self._probe, min(2 * next_s, _MAX_PROBE_S))

    def send_400_response(self, msg: str) -> None:
        """The parser rejected the request."""
        self._refuse(InvalidRequest(f"{msg} Send HTTP/1.1."))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._is_new = False
        self._reading = _Reading.HEAD
        if self._num_open == 0:
            self._give_up_s = self.loop.time() + self._patience.request_s

    def on_headers_complete(self) -> None:
        """Start the request, or queue it behind an earlier one."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser reports it as a 400
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False
        self._reading = _Reading.BODY
        self._num_open += 1
        self._num_odd_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Answer a request."""
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, unchunked(cycle, app) if is_old else app)

    def on_body(self, body: bytes) -> None:
        """Extend the timeout by the part of the body that arrived."""
        super().on_body(body)
        self._num_odd_bytes = 0
        if self._num_open > 0:
            self._give_up_s += len(body) / self._patience.bytes_a_s

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        if self._parser.skips_body():
            return
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        if self._num_open == 0:
            self._wait(self._patience.idle_s)
            return
        self._give_up_s = math.inf
        if self._admission is not None:
            self._admission.busy(self)

    def on_response_complete(self) -> None:
        """The last byte of a response was handed to the transport."""
        super().on_response_complete()
        # `check` replaces uvicorn's timer, which would keep a reset connection in memory until it fires.
        self._unset_keepalive_if_required()
        self._num_open -= 1
        self._since_s = self.loop.time()
        if self._num_open == 0 and self._reading is _Reading.NOTHING:
            self._wait(self._patience.linger_s if self._is_last else self._patience.idle_s)
        elif self._num_open == 0 and self._reading is _Reading.BODY:
            self._wait(self._patience.rest_s)
        elif self._num_open == 0 or (self._num_open == 1 and self._reading is _Reading.BODY):
            self._wait(self._patience.request_s)

    def shutdown(self) -> None:
        """Close after the request that is being answered or read, or the next one: a new connection's first,
        if it begins within `rest_s`, or that of a client whose last answer has just ended, or began without
        a word about this, within `linger_s`.
        """
        self._is_last = True
        if self._reading is _Reading.HEAD or self._is_promised():
            return
        give_up_s = self._since_s + (self._patience.rest_s if self._is_new else self._patience.linger_s)
        if self._num_open == 0 and self.loop.time() < give_up_s:
            self._give_up_s = give_up_s
        else:
            super().shutdown()

    def _is_promised(self) -> bool:
        """Whether the newest answer has begun with a header that lets the client send more requests."""
        return self._num_open > 0 and self.cycle.response_started

    def resume_writing(self) -> None:
        """The client has read most of the unsent data."""
        self._taken_s = self.loop.time()
        super().resume_writing()

    def _wait(self, limit_s: float) -> None:
        """Wait for the client, for at most `limit_s`."""
        self._give_up_s = self.loop.time() + limit_s
        if self._admission is not None:
            self._admission.wait(self)

    def _takes_nothing(self, now_s: float) -> bool:
        """Whether the client has stopped reading. Only judged while no data is added to the buffer."""
        unsent_bytes = self.transport.get_write_buffer_size()
        is_stuck = self.flow.write_paused or self.transport.is_closing()
        if not is_stuck or unsent_bytes == 0 or unsent_bytes < self._unsent_bytes:
            self._taken_s = now_s
        self._unsent_bytes = unsent_bytes
        return now_s - self._taken_s > self._patience.unread_s

    def _refuse(self, error: BatonError) -> None:
        """Close the connection, after an error response if one can still be sent.

        Incoming data is discarded for `rest_s`, so that the response reaches a client that is still sending.
        """
        if self._is_refused:
            return
        self._is_refused = True
        log.info("refused client=%s status=%d reason=%s", self.client, error.status, error.message)
        if not self._may_answer():
            self.transport.close()
        elif not self.transport.is_closing():
            body = msgspec.json.encode(ErrorBody.of(error))
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            if self.transport.can_write_eof():  # not over TLS
                self.transport.write_eof()
            self._wait(self._patience.rest_s)
            if self._num_open > 0:  # the app waits for the body
                self.cycle.disconnected = True
                self.cycle.message_event.set()

    def _may_answer(self) -> bool:
        if self._reading is _Reading.BODY:
            return self._num_open == 1 and not self.cycle.response_started
        return self._num_open == 0
