"""One client's connection: uvicorn's HTTP protocol, and how long and with how much it may keep us waiting."""

import asyncio
import enum
import logging
import math
from http import HTTPStatus
from typing import cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton.errors import BatonError, InvalidRequest
from baton.listener import Admission
from frontend.http.errors import ErrorBody

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers; also of what may come between two parts of a body and is no body."""
MAX_PIPELINED = 8
"""Requests that a client may send ahead, before the earlier ones are answered."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a client may keep its connection waiting.

    `request_s`: from the first byte of a request to its last, and a second more for each `bytes_a_s` of body.
    `idle_s`: between requests, and before the first. `unread_s`: without taking a byte of what is sent to it.
    `rest_s`: how long the rest of a request is read that was answered before its end.
    """

    request_s: float = 30.0
    bytes_a_s: int = 64 << 10
    idle_s: float = 75.0
    unread_s: float = 60.0
    rest_s: float = 2.0


class RequestTooSlow(BatonError):
    """The request was not there in time."""

    code = "request_timeout"
    status = 408
    kind = "invalid_request_error"


class HeadTooLarge(BatonError):
    """The headers are longer than this server reads."""

    code = "headers_too_large"
    status = 431
    kind = "invalid_request_error"


class _Reading(enum.Enum):
    """Which part of a request is expected next."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class Connection(HttpToolsProtocol):
    """Waits in its admission unless a whole request of it is being answered."""

    def __init__(self, config: uvicorn.Config, state: ServerState, patience: Patience) -> None:
        super().__init__(config, state, {})
        self._patience = patience
        self._admission: Admission[Connection] | None = None
        self._is_evicted = False
        self._is_refused = False
        self._reading = _Reading.NOTHING
        self._num_open = 0  # requests whose head was read and whose answer is not complete
        self._num_odd_bytes = 0  # since the last sign of progress
        self._give_up_s = math.inf
        self._unsent_bytes = 0
        self._taken_s = 0.0

    def enter(self, admission: Admission["Connection"]) -> bool:
        """Be one of these, until the connection is lost; False if they are too many."""
        if not admission.enter(self):
            return False
        self._admission = admission
        return True

    def evict(self) -> None:
        """Make room for another client, at once."""
        self._is_evicted = True
        if self.transport is not None:
            self.transport.abort()

    def check(self, now_s: float) -> None:
        """Hang up if the client has kept us waiting for too long. To be called about once a second."""
        if self._takes_nothing(now_s):
            log.info("dropped client=%s reason=it does not read its answer", self.client)
            self.transport.abort()
        elif now_s <= self._give_up_s or self.transport.is_closing():
            return
        elif self._reading is _Reading.NOTHING or self._is_refused:
            self.transport.close()
        else:
            self._refuse(RequestTooSlow("The request did not arrive in time; send it faster, or send less."))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is here."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._wait(self._patience.idle_s)
        if self._is_evicted:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or we have hung up."""
        if self._admission is not None:
            self._admission.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, as long as that gets anywhere: the parser itself reads headers without end."""
        if self._is_refused:
            return
        self._num_odd_bytes += len(data)
        super().data_received(data)
        if self._num_odd_bytes > MAX_HEAD_BYTES:
            self._refuse(HeadTooLarge(f"The headers are longer than {MAX_HEAD_BYTES} bytes; send less."))

    def send_400_response(self, msg: str) -> None:
        """The parser could not read on."""
        self._refuse(InvalidRequest(f"{msg} It must be HTTP/1.1."))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._reading = _Reading.HEAD
        if self._num_open == 0:
            self._give_up_s = self.loop.time() + self._patience.request_s

    def on_headers_complete(self) -> None:
        """The request is handed on, or waits for the answer to an earlier one."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # ends the parser, which reports it as a 400
        super().on_headers_complete()
        self._reading = _Reading.BODY
        self._num_open += 1
        self._num_odd_bytes = 0

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        super().on_body(body)
        self._num_odd_bytes = 0
        if self._num_open > 0:
            self._give_up_s += len(body) / self._patience.bytes_a_s

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        super().on_message_complete()
        self._reading = _Reading.NOTHING
        self._num_odd_bytes = 0
        if self._num_open == 0:
            self._wait(self._patience.idle_s)
            return
        self._give_up_s = math.inf
        if self._admission is not None:
            self._admission.busy(self)

    def on_response_complete(self) -> None:
        """The last byte of an answer was handed to the transport."""
        super().on_response_complete()
        # `check` has its place. After a reset, this timer would keep the connection in memory until it fires.
        self._unset_keepalive_if_required()
        self._num_open -= 1
        if self._num_open == 0 and self._reading is _Reading.NOTHING:
            self._wait(self._patience.idle_s)
        elif self._num_open == 0 and self._reading is _Reading.BODY:
            self._wait(self._patience.rest_s)
        elif self._num_open == 0 or (self._num_open == 1 and self._reading is _Reading.BODY):
            self._wait(self._patience.request_s)

    def resume_writing(self) -> None:
        """The client has taken most of what was unsent."""
        self._taken_s = self.loop.time()
        super().resume_writing()

    def _wait(self, limit_s: float) -> None:
        """It is the client's turn."""
        self._give_up_s = self.loop.time() + limit_s
        if self._admission is not None:
            self._admission.wait(self)

    def _takes_nothing(self, now_s: float) -> bool:
        """Only while nothing is added, what is unsent tells whether the client reads."""
        unsent_bytes = self.transport.get_write_buffer_size()
        is_stuck = self.flow.write_paused or self.transport.is_closing()
        if not is_stuck or unsent_bytes == 0 or unsent_bytes < self._unsent_bytes:
            self._taken_s = now_s
        self._unsent_bytes = unsent_bytes
        return now_s - self._taken_s > self._patience.unread_s

    def _refuse(self, error: BatonError) -> None:
        """Hang up, with an answer if the client can still take it for that of its request.

        That it may reach a client that goes on sending, what comes is read for a while, and thrown away.
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
            self.transport.write_eof()
            self._wait(self._patience.rest_s)
            if self._num_open > 0:  # it waits for the body
                self.cycle.disconnected = True
                self.cycle.message_event.set()

    def _may_answer(self) -> bool:
        if self._reading is _Reading.BODY:
            return self._num_open == 1 and not self.cycle.response_started
        return self._num_open == 0
