"""One HTTP request and its response over ASGI: headers, formats of errors, disconnect."""

import asyncio
import hashlib
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import msgspec

from baton.errors import BatonError, DeadlineExceeded, InvalidRequest
from baton.telemetry import Line
from frontend.turn.ids import repeatable

log = logging.getLogger(__name__)

Headers = Sequence[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class ErrorDetail(msgspec.Struct, kw_only=True):
    """An error: message, OpenAI's type, the path of the offending field, Baton's code."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of an error response, but for the Messages API."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: BatonError) -> "ErrorBody":
        return cls(
            error=ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
        )


class MessagesErrorDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An error: Anthropic's type, a message, and the `error_code` of one that its SDKs recover from."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessagesError(msgspec.Struct, kw_only=True):
    """The body of every error response of the Messages API."""

    error: MessagesErrorDetail
    type: Literal["error"] = "error"

    @classmethod
    def of(cls, error: BatonError) -> "MessagesError":
        """Claude Code compacts a conversation only at Anthropic's words."""
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        details = {"error_code": error.code} if error.code == "thread_not_found" else None
        return cls(error=MessagesErrorDetail(type=kind, message=message, details=details))


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(path: str) -> type[ErrorBody] | type[MessagesError]:
    """The error format of a route's API."""
    return MessagesError if path.startswith("/v1/messages") else ErrorBody


def as_baton_error(error: Exception, request_id: str) -> BatonError:
    """The error for the client; unexpected exceptions are logged with their traceback."""
    match error:
        case BatonError():
            return error
        case TimeoutError():
            return DeadlineExceeded()
        case _:
            log.error(Line("unexpected failure", request_id=request_id), exc_info=error)
            return BatonError(f"Internal server error; see the server's log for request {request_id}.")


def error_headers(error: BatonError) -> Headers:
    """401: how to authenticate. 429 and 503: Retry-After in whole seconds, rounded up, at least 1."""
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if error.status not in {429, 503}:
        return []
    return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1)))]


_IDEMPOTENCY_KEY = re.compile(rb"[ -~]{0,255}")
_EVENT_ID = re.compile(rb"(\d{1,9})\.([0-9a-f]{8})")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")


class ClientGone(Exception):
    """The client has disconnected."""


class Exchange:
    """A request and its single response, sent whole or in pieces.

    `request_id` is the client's `x-request-id` if valid, else a new one. `started` is set once the status is
    sent; a later failure cannot change it, and a stream has `end_failed` for that. `headers` has the
    last value of each, `path_params` are the route's path parameters, `query` is the raw query string,
    `address` the client's, `key_name` that of its API key (empty if keys are not checked). `blocked_s` gets
    each time that a write waited for the client, `gone` is done when the client has disconnected."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._error_body = error_body(scope["path"])
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.headers: Mapping[bytes, bytes] = headers
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.query: str = scope["query_string"].decode(errors="replace")
        self.started = False
        self.end_failed: Callable[[BatonError], Awaitable[None]] | None = None
        self.key_name: str = scope.get("key_name", "")
        self.address: str = (scope.get("client") or ("",))[0]
        self.blocked_s: list[float] = scope.get("blocked_s", [])
        self.gone = cast("asyncio.Future[None]", scope.get("gone"))  # the server sets it
        self._drain: Callable[[], Awaitable[None]] | None = scope.get("drain")
        self.receive = receive
        self.send = send

    @property
    def idempotency_key(self) -> str:
        """The client's; empty without one. Raises InvalidRequest."""
        given = self.headers.get(b"idempotency-key")
        if given is None:
            return ""
        if not _IDEMPOTENCY_KEY.fullmatch(given):
            raise InvalidRequest.at("Idempotency-Key", "is limited to 255 printable ASCII characters.")
        return given.decode()

    @property
    def last_event(self) -> tuple[int, int] | None:
        """The number and the checksum of the last event that the client has. Raises InvalidRequest."""
        given = self.headers.get(b"last-event-id")
        if not given:
            return None
        found = _EVENT_ID.fullmatch(given)
        if found is None or not self.idempotency_key:
            what = "must be the `id` of the last event that came, with the same `Idempotency-Key`."
            raise InvalidRequest.at("Last-Event-ID", what)
        return int(found[1]), int(found[2], 16)

    @property
    def owner(self) -> str:
        """The name of the client's API key or, if keys are not checked, a digest; empty without a key."""
        if self.key_name:
            return f"key {self.key_name}"
        key = self.headers.get(b"authorization") or self.headers.get(b"x-api-key")
        return hashlib.sha256(key).hexdigest() if key else ""

    def repeated(self) -> AbstractContextManager[None]:
        """In this context the same is drawn for requests with the same idempotency key, if there is one.
        Raises InvalidRequest, also for the last event."""
        key, _ = self.idempotency_key, self.last_event
        return repeatable(f"{self.owner} {key}") if key else nullcontext()

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        request_id = self.request_id.encode()
        # OpenAI's name of the header, and Anthropic's.
        fixed = [(b"content-type", content_type), (b"x-request-id", request_id), (b"request-id", request_id)]
        await self.send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        self.started = True

    async def start_events(self, headers: Headers = ()) -> None:
        """Send status and headers of server-sent events, which proxies neither store nor hold back."""
        fixed = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self.start(200, b"text/event-stream; charset=utf-8", [*fixed, *headers])

    def end(self, data: bytes = b"") -> Awaitable[None]:
        return self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: msgspec.Struct | msgspec.Raw, headers: Headers = ()) -> None:
        """Send a complete JSON response; Raw is already encoded."""
        data = msgspec.json.encode(body)
        await self.start(status, b"application/json", [(b"content-length", b"%d" % len(data)), *headers])
        await self.end(data)

    async def taken(self) -> None:
        """Return when the client has read what was sent, but for what buffers hold."""
        if self._drain is not None:
            await self._drain()

    async def fail(self, error: BatonError, headers: Headers = ()) -> None:
        """Send an error response, with the headers that its status needs, or the event that ends a stream, if
        that is possible."""
        if not self.started:
            await self.answer(error.status, self._error_body.of(error), [*error_headers(error), *headers])
        elif self.end_failed is not None:
            await self.end_failed(error)


def ignored_header(ignored: Sequence[str]) -> Headers:
    """The x-baton-ignored header: the body's unknown fields in at most 1000 bytes of printable ASCII."""
    if not ignored:
        return []
    text = ", ".join(ignored).encode("ascii", "backslashreplace")[:1000]
    return [(b"x-baton-ignored", re.sub(rb"[^\x20-\x7e]", b"?", text))]
