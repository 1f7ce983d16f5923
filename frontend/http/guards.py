"""Guards before the app: names that are not this server's, web pages of other origins, API keys."""

from collections.abc import Awaitable, Callable, Collection
from fnmatch import fnmatchcase
from functools import lru_cache

from starlette.middleware.cors import CORSMiddleware

from baton.errors import InvalidRequest
from frontend.http.exchange import AsgiApp, Exchange, Receive, Scope, Send
from frontend.http.keys import ApiKey, Keys, key_of, presented
from frontend.metrics import Metrics

_CLOSE = [(b"connection", b"close")]  # the body is not read
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


class OriginNotAllowed(InvalidRequest, code="origin_not_allowed", status=403):
    """Web pages of this origin may not send requests."""


class HostNotAllowed(InvalidRequest, code="host_not_allowed", status=403):
    """The request was sent to a name that the operator has not allowed."""


class InvalidApiKey(InvalidRequest, code="invalid_api_key", status=401):
    """The request has no API key, or one that is not known here."""


class AdminKeyNeeded(InvalidRequest, code="admin_key_needed", status=403):
    """The API key is not marked as an admin's."""


class Guards:
    """ASGI middleware that refuses requests without reading their bodies.

    Names: a web page may let its own name point to this server's address and then read answers as if they
    came from its own server. Its requests have that name as `Host`. Served are addresses, `localhost`,
    `names`, which may contain `*`, and names without a dot: a network gives them to its machines and
    services, and no one else can register one. `named_paths`: only these are checked.

    Web pages: CORS for `origins`, which may contain `*`. Browsers send a preflight request before JSON, but
    not before form content types; these are refused, so that a web page cannot use a server on the user's
    machine.

    API keys: every path but OPEN_PATHS needs one of `keys()`, ADMIN_PATHS one that is marked admin. The scope
    gets its `key_name` and `is_admin`, on open paths too. Without `keys` everyone is served."""

    def __init__(
        self,
        app: AsgiApp,
        metrics: Metrics,
        *,
        keys: Callable[[], Keys] | None = None,
        origins: Collection[str] = (),
        names: Collection[str] = ("*",),
        named_paths: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._origins = frozenset(origins)
        self._readable = CORSMiddleware(
            self._authenticate,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
            allow_private_network=True,
        )
        self._names = [name.lower() for name in names]
        self._named_paths = named_paths
        self._is_known = lru_cache(256)(self._knows)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        headers = dict(scope["headers"])
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        is_named = self._named_paths is None or scope["path"] in self._named_paths
        if is_named and not self._is_known(host):
            error: InvalidRequest = HostNotAllowed(
                f"{_name(host)[:100]!r} is not known as a name of this server. Use its address, or start the "
                "frontend with --allowed-host NAME."
            )
        elif origin is not None and not self._origins.isdisjoint({"*", origin.decode("latin-1")}):
            return self._readable(scope, receive, send)
        elif (
            origin is None
            or scope["method"] in {"GET", "HEAD"}
            or headers.get(b"content-type", b"").partition(b";")[0].strip() == b"application/json"
        ):
            return self._authenticate(scope, receive, send)
        else:
            error = OriginNotAllowed(
                "Cross-origin requests must have content type application/json. To allow this origin, start "
                "the frontend with --cors-origin."
            )
        return Exchange(scope, receive, send).fail(error, _CLOSE)

    def _knows(self, host: bytes) -> bool:
        name = _name(host)
        last = name.rpartition(".")[2]
        if "." not in name or last == "localhost" or (last.isascii() and last.isdigit()):
            return True  # a browser takes a name for an address if its last label is a number
        return any(fnmatchcase(name, each) for each in self._names)

    def _authenticate(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        error = None if self._keys is None else _key_error(scope, self._keys())
        if error is None:
            return self._app(scope, receive, send)
        return self._refuse(error, Exchange(scope, receive, send))

    async def _refuse(self, error: InvalidRequest, exchange: Exchange) -> None:
        record = self._metrics.begin(ROUTE, exchange.request_id, exchange.key_name)
        record.status, record.code, record.address = error.status, error.code, exchange.address
        try:
            await exchange.fail(error)
        finally:
            self._metrics.end(record)


def _name(host: bytes) -> str:
    """Without the port; of an IPv6 address nothing."""
    text = host.decode("latin-1").strip().lower()
    return "" if text.startswith("[") else text.partition(":")[0].removesuffix(".")


def _key_error(scope: Scope, keys: Keys) -> InvalidRequest | None:
    """Why the request's key is not enough for its path; the scope gets the key's name."""
    path, key = scope["path"], key_of(keys, scope["headers"])
    scope["key_name"], scope["is_admin"] = key or ApiKey("")
    if key is not None and path in ADMIN_PATHS and not key.is_admin:
        return AdminKeyNeeded(
            f"{path} needs an admin's API key: make one with `python -m baton key NAME --admin`."
        )
    if key is not None or path in OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
        return None
    return InvalidApiKey(
        "This API key is not known here; check it, or ask the operator for a new one."
        if presented(scope["headers"])
        else "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
    )
