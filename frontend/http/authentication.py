"""Refuses requests without a known API key, before anything of their body is read."""

import logging
from collections.abc import Callable

from baton.errors import BatonError
from frontend.http.errors import Envelope
from frontend.http.exchange import AsgiApp, Exchange, Receive, Scope, Send
from frontend.http.keys import Keys, known, presented

OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/health", "/live", "/metrics"})
"""Pages and probes, which show names and figures but nothing of any request."""

log = logging.getLogger(__name__)


class InvalidApiKey(BatonError):
    """The request has no API key, or one that is not known here."""

    code = "invalid_api_key"
    status = 401
    kind = "invalid_request_error"


class Authentication:
    """ASGI middleware. Every path but OPEN_PATHS needs one of `keys()`; the app finds it in the scope."""

    def __init__(
        self, app: AsgiApp, keys: Callable[[], Keys], envelope_of: Callable[[str], Envelope]
    ) -> None:
        """`envelope_of` gives the error format of a path."""
        self._app = app
        self._keys = keys
        self._envelope_of = envelope_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] not in OPEN_PATHS:
            key = known(self._keys(), scope["headers"])
            if key is None:
                await self._refuse(scope, receive, send)
                return
            scope["api_key"] = key
        await self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._envelope_of(scope["path"]))
        error = InvalidApiKey(
            "This API key is not known here; check it, or ask the operator for a new one."
            if presented(scope["headers"])
            else "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )
        log.info(
            "refused request_id=%s status=%d client=%s", exchange.request_id, error.status, exchange.address
        )
        await exchange.answer_error(error)
