"""Refuses requests under names that are not this server's, against DNS rebinding."""

import ipaddress
from collections.abc import Collection
from fnmatch import fnmatchcase
from functools import lru_cache

from baton.errors import BatonError
from frontend.http.errors import ErrorBody
from frontend.http.exchange import AsgiApp, Exchange, Receive, Scope, Send


class HostNotAllowed(BatonError):
    """The request was sent to a name that the operator has not allowed."""

    code = "host_not_allowed"
    status = 403
    kind = "invalid_request_error"


class Hosts:
    """ASGI middleware. A web page may let its own name point to this server's address and then read answers
    as if they came from its own server. Its requests have that name as `Host`.

    Addresses, `localhost` and `names`, which may contain `*`, are served. So are names without a dot: a
    network gives them to its machines and services, and no one else can register one.
    """

    def __init__(self, app: AsgiApp, names: Collection[str]) -> None:
        self._app = app
        self._names = [name.lower() for name in names]
        self._is_allowed = lru_cache(256)(self._allows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        if self._is_allowed(host):
            await self._app(scope, receive, send)
            return
        error = HostNotAllowed(
            f"{_name(host)[:100]!r} is not known as a name of this server. Use its address, or start the "
            "frontend with --allowed-host NAME."
        )
        await Exchange(scope, receive, send).answer(
            error.status, ErrorBody.of(error), [(b"connection", b"close")]
        )

    def _allows(self, host: bytes) -> bool:
        name = _name(host)
        if "." not in name or _is_address(name) or name.endswith(".localhost"):
            return True
        return any(fnmatchcase(name, each) for each in self._names)


def _name(host: bytes) -> str:
    """Without the port."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
