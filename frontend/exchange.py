"""One HTTP request and its answer, in ASGI's terms: body, headers, error envelope, the client's leaving."""

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from baton.errors import BatonError
from frontend.answers import BodyTooLarge, ErrorBody

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")
_TRACE = re.compile(rb"[0-9a-f-]{1,128}")


class ClientGone(Exception):
    """The client has left; nobody reads what would be answered."""


class Exchange:
    """A request that is answered once, whole or piece by piece.

    `request_id` is the client's `x-request-id` if that is a sane one, else a new one. `started` says that
    the status is sent, so that a failure can no longer be one.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        trace = headers.get(b"traceparent", b"")
        self.trace = trace.decode() if _TRACE.fullmatch(trace) else None
        self.started = False
        self._declared_bytes = headers.get(b"content-length", b"0")
        self._receive = receive
        self._send = send

    async def read_body(self, max_bytes: int) -> bytes:
        """The whole body. Raises BodyTooLarge, as soon as that is known, or ClientGone."""
        if self._declared_bytes.isdigit() and int(self._declared_bytes) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            if not message.get("more_body", False):
                return bytes(body)

    async def client_gone(self) -> None:
        """Returns when the client has left, or has been answered."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        fixed = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": fixed + headers})

    async def write(self, data: bytes) -> None:
        """Send more of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the rest of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: msgspec.Struct, headers: Headers) -> None:
        """Send a whole answer as JSON."""
        data = msgspec.json.encode(body)
        await self.start(status, b"application/json", [(b"content-length", b"%d" % len(data)), *headers])
        await self.end(data)

    async def answer_error(self, error: BatonError) -> None:
        """Send an error's envelope, with Retry-After where coming back makes sense."""
        await self.answer(error.status, ErrorBody.of(error), retry_after(error))


def retry_after(error: BatonError) -> Headers:
    """The Retry-After header of 429 and 503: whole seconds, 1 at least."""
    if error.status not in {429, 503}:
        return []
    return [(b"retry-after", b"%d" % max(1, round(error.retry_after_s or 1)))]


def ignored_header(ignored: tuple[str, ...]) -> Headers:
    """Names the fields of the body that were not understood; at most 1000 bytes of printable ASCII."""
    if not ignored:
        return []
    text = ", ".join(ignored).encode("ascii", "backslashreplace")[:1000]
    return [(b"x-baton-ignored", re.sub(rb"[^\x20-\x7e]", b"?", text))]


def _too_large(max_bytes: int) -> BatonError:
    return BodyTooLarge(f"The body is larger than {max_bytes} bytes; send less.")
