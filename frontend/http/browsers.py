"""CORS: allows the operator's origins and rejects cross-origin form posts from all others."""

from collections.abc import Collection

from baton.errors import BatonError
from frontend.http.errors import ErrorBody
from frontend.http.exchange import AsgiApp, Exchange, Message, Receive, Scope, Send

_PREFLIGHT_S = 600


class OriginNotAllowed(BatonError):
    """Web pages of this origin may not send requests."""

    code = "origin_not_allowed"
    status = 403
    kind = "invalid_request_error"


class Browsers:
    """ASGI middleware. Requests without an Origin header are passed through.

    Browsers send a preflight request before JSON, but not before form content types; these are rejected, so
    that a web page cannot use a server on the user's machine. `origins` may contain `*`.
    """

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif not self._allows(origin):
            is_json = headers.get(b"content-type", b"").partition(b";")[0].strip() == b"application/json"
            await (self._app if scope["method"] in {"GET", "HEAD"} or is_json else _refuse)(
                scope, receive, send
            )
        elif scope["method"] == "OPTIONS":
            await _allow(origin, headers.get(b"access-control-request-headers", b"*"), send)
        else:
            await self._app(scope, receive, _readable(origin, send))

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    error = OriginNotAllowed(
        "Cross-origin requests must have content type application/json. To allow this origin, start the "
        "frontend with --cors-origin."
    )
    await Exchange(scope, receive, send).answer(
        error.status, ErrorBody.of(error), [(b"connection", b"close")]
    )


async def _allow(origin: bytes, asked: bytes, send: Send) -> None:
    headers = [
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", asked),
        (b"access-control-max-age", b"%d" % _PREFLIGHT_S),
        (b"vary", b"origin"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _readable(origin: bytes, send: Send) -> Send:
    added = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"]]
            ours = {name for name, _ in headers if name.startswith(b"x-")} | {b"retry-after", b"request-id"}
            headers.append((b"access-control-expose-headers", b", ".join(sorted(ours))))
            message = {**message, "headers": headers + added}
        await send(message)

    return forward
