"""One HTTP request and its response over ASGI: body, headers, error envelope, disconnect."""

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from baton.errors import BatonError, InvalidRequest
from frontend.http.errors import BodyTooLarge, EncodedBody, Envelope, ErrorBody, Headers, error_headers
from frontend.http.limits import NO_QUOTA, ApiKey, Quota

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_IDEMPOTENCY_KEY = re.compile(rb"[ -~]{0,255}")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")


class ClientGone(Exception):
    """The client has disconnected."""


class Exchange:
    """A request and its single response, sent whole or in pieces.

    `request_id` is the client's `x-request-id` if valid, else a new one. `started` is set once the status is
    sent; a later failure cannot change it. `path_params` are the route's path parameters, `query` is the raw
    query string, `address` the client's, `key_name` that of its API key (empty if keys are not checked),
    `quota` what the key may still use.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, envelope: Envelope = ErrorBody.of) -> None:
        self._envelope = envelope
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self._idempotency_key: bytes = headers.get(b"idempotency-key", b"")
        self.last_event_id: str = headers.get(b"last-event-id", b"").decode(errors="replace")
        self.path_params: Mapping[str, str] = scope.get("path_params", {})
        self.query: str = scope["query_string"].decode(errors="replace")
        self.started = False
        self._encoding: bytes = headers.get(b"content-encoding", b"identity")
        key: ApiKey | None = scope.get("api_key")
        self.key_name = "" if key is None else key.name
        self.quota: Quota = scope.get("quota") or NO_QUOTA
        self._key: bytes = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        self.address: str = (scope.get("client") or ("",))[0]
        self._declared_bytes = headers.get(b"content-length", b"0")
        self._receive = receive
        self._send = send

    @property
    def idempotency_key(self) -> str:
        """The client's; empty without one. Raises InvalidRequest."""
        if not _IDEMPOTENCY_KEY.fullmatch(self._idempotency_key):
            raise InvalidRequest(
                "`Idempotency-Key` is limited to 255 printable ASCII characters.", param="Idempotency-Key"
            )
        return self._idempotency_key.decode()

    @property
    def owner(self) -> str:
        """The name of the client's API key or, if keys are not checked, a digest; empty without a key."""
        if self.key_name:
            return f"key {self.key_name}"
        return hashlib.sha256(self._key).hexdigest() if self._key else ""

    async def read_body(self, max_bytes: int, count: Callable[[int], object] = lambda _: None) -> bytes:
        """The whole body. Calls `count` with the number of bytes so far. Raises EncodedBody, BodyTooLarge
        (before reading if declared) or ClientGone.
        """
        if self._encoding != b"identity":
            encoding = self._encoding.decode(errors="replace")[:40]
            raise EncodedBody(f"Content-Encoding {encoding!r} is not supported; send plain JSON.")
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
            count(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    async def client_gone(self, probe: Callable[[], object] = lambda: None) -> None:
        """Returns when the client has disconnected or the response is complete. Calls `probe` now and then if
        the client sends no more: only a write shows whether it still reads."""
        while (await self._receive())["type"] != "http.disconnect":
            probe()

    async def start(self, status: int, content_type: bytes, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        request_id = self.request_id.encode()
        # OpenAI's name of the header, and Anthropic's.
        fixed = [(b"content-type", content_type), (b"x-request-id", request_id), (b"request-id", request_id)]
        headers = [*fixed, *headers, *self.quota.headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send more of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the rest of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, body: msgspec.Struct | msgspec.Raw, headers: Headers = ()) -> None:
        """Send a complete JSON response; Raw is already encoded."""
        data = msgspec.json.encode(body)
        await self.start(status, b"application/json", [(b"content-length", b"%d" % len(data)), *headers])
        await self.end(data)

    async def answer_error(self, error: BatonError) -> None:
        """Send an error response, with the headers that its status needs."""
        await self.answer(error.status, self._envelope(error), error_headers(error))


def ignored_header(ignored: tuple[str, ...]) -> Headers:
    """The x-baton-ignored header: the body's unknown fields in at most 1000 bytes of printable ASCII."""
    if not ignored:
        return []
    text = ", ".join(ignored).encode("ascii", "backslashreplace")[:1000]
    return [(b"x-baton-ignored", re.sub(rb"[^\x20-\x7e]", b"?", text))]


def _too_large(max_bytes: int) -> BatonError:
    return BodyTooLarge(f"The body exceeds the limit of {max_bytes} bytes.")
