"""Guards before the app: API keys, web pages of other origins, names that are not this server's."""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import lru_cache

from starlette.middleware.cors import CORSMiddleware

from baton.errors import InvalidRequest
from frontend.http.exchange import AsgiApp, Envelope, Exchange, Receive, Scope, Send
from frontend.http.keys import ApiKey, Keys, key_of, presented
from frontend.metrics import Metrics

_CLOSE = [(b"connection", b"close")]  # the body is not read


class OriginNotAllowed(InvalidRequest):
    """Web pages of this origin may not send requests."""

    code = "origin_not_allowed"
    status = 403


class Browsers:
    """ASGI middleware: CORS for the operator's origins, which may contain `*`. Requests without an Origin
    header are passed through.

    Browsers send a preflight request before JSON, but not before form content types; these are rejected, so
    that a web page cannot use a server on the user's machine.
    """

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._readable = CORSMiddleware(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = dict(scope["headers"])
        origin: bytes | None = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif not self._origins.isdisjoint({"*", origin.decode("latin-1")}):
            await self._readable(scope, receive, send)
        elif scope["method"] in {"GET", "HEAD"} or _is_json(headers.get(b"content-type", b"")):
            await self._app(scope, receive, send)
        else:
            error = OriginNotAllowed(
                "Cross-origin requests must have content type application/json. To allow this origin, start "
                "the frontend with --cors-origin."
            )
            await Exchange(scope, receive, send).fail(error, _CLOSE)


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip() == b"application/json"


class HostNotAllowed(InvalidRequest):
    """The request was sent to a name that the operator has not allowed."""

    code = "host_not_allowed"
    status = 403


class Hosts:
    """ASGI middleware. A web page may let its own name point to this server's address and then read answers
    as if they came from its own server. Its requests have that name as `Host`.

    Addresses, `localhost` and `names`, which may contain `*`, are served. So are names without a dot: a
    network gives them to its machines and services, and no one else can register one.
    """

    def __init__(self, app: AsgiApp, names: Collection[str], paths: Collection[str] | None = None) -> None:
        """`paths`: only these are checked."""
        self._app = app
        self._paths = paths
        self._names = [name.lower() for name in names]
        self._is_allowed = lru_cache(256)(self._allows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        if self._is_allowed(host) or (self._paths is not None and scope["path"] not in self._paths):
            await self._app(scope, receive, send)
            return
        error = HostNotAllowed(
            f"{_name(host)[:100]!r} is not known as a name of this server. Use its address, or start the "
            "frontend with --allowed-host NAME."
        )
        await Exchange(scope, receive, send).fail(error, _CLOSE)

    def _allows(self, host: bytes) -> bool:
        name = _name(host)
        last = name.rpartition(".")[2]
        if "." not in name or last == "localhost" or (last.isascii() and last.isdigit()):
            return True  # a browser takes a name for an address if its last label is a number
        return any(fnmatchcase(name, each) for each in self._names)


def _name(host: bytes) -> str:
    """Without the port; of an IPv6 address nothing."""
    text = host.decode("latin-1").strip().lower()
    return "" if text.startswith("[") else text.partition(":")[0].removesuffix(".")


OPEN_PATHS = frozenset({"/", "/docs", "/redoc", "/openapi.json", "/health", "/live", "/metrics", "/fleet"})
"""Pages and probes, which show names and figures but nothing of any request."""
_OPEN_FOLDERS = ("/docs/assets/", "/page/")
"""Scripts and styles of the documentation and the live page."""
PAGE_PATHS = frozenset({"/", "/fleet", "/health"})
"""What a web page under another name could read without an API key."""
ADMIN_PATHS = frozenset({"/requests"})
"""They show requests of all keys."""
ROUTE = "authentication"
"""The `route` label of refused requests in the metrics."""


class InvalidApiKey(InvalidRequest):
    """The request has no API key, or one that is not known here."""

    code = "invalid_api_key"
    status = 401


class AdminKeyNeeded(InvalidRequest):
    """The API key is not marked as an admin's."""

    code = "admin_key_needed"
    status = 403


class Authentication:
    """ASGI middleware. Every path but OPEN_PATHS needs one of `keys()`, ADMIN_PATHS one that is marked admin.
    The scope gets its `key_name` and `is_admin`, on open paths too."""

    def __init__(
        self,
        app: AsgiApp,
        keys: Callable[[], Keys],
        envelope_of: Callable[[str], Envelope],
        metrics: Metrics,
    ) -> None:
        """`envelope_of` gives the error format of a path."""
        self._app = app
        self._keys = keys
        self._envelope_of = envelope_of
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path, key = scope["path"], key_of(self._keys(), scope["headers"])
        error: InvalidRequest | None = None
        scope["key_name"], scope["is_admin"] = key or ApiKey("")
        if key is not None:
            if path in ADMIN_PATHS and not key.is_admin:
                error = AdminKeyNeeded(
                    f"{path} needs an admin's API key: make one with `python -m baton key NAME --admin`."
                )
        elif path not in OPEN_PATHS and not path.startswith(_OPEN_FOLDERS):
            error = InvalidApiKey(
                "This API key is not known here; check it, or ask the operator for a new one."
                if presented(scope["headers"])
                else "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(Exchange(scope, receive, send, self._envelope_of(path)), error)

    async def _refuse(self, exchange: Exchange, error: InvalidRequest) -> None:
        record = self._metrics.begin(ROUTE, exchange.request_id, exchange.key_name)
        record.status, record.code, record.address = error.status, error.code, exchange.address
        try:
            await exchange.fail(error)
        finally:
            self._metrics.end(record)
