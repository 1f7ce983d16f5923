"""Refuses requests without a known API key, before anything of their body is read."""

import logging
from collections.abc import Callable

from baton.errors import BatonError
from frontend.http.errors import Envelope
from frontend.http.exchange import AsgiApp, Exchange, Receive, Scope, Send
from frontend.http.limits import Keys, Quotas, known, presented
from frontend.metrics import Metrics

OPEN_PATHS = frozenset({"/", "/docs", "/redoc", "/openapi.json", "/health", "/live", "/metrics"})
"""Pages and probes, which show names and figures but nothing of any request."""
ASSETS = "/docs/assets/"
"""Scripts and styles of the documentation."""
ROUTE = "authentication"
"""The `route` label of refused requests in the metrics."""

log = logging.getLogger(__name__)


class InvalidApiKey(BatonError):
    """The request has no API key, or one that is not known here."""

    code = "invalid_api_key"
    status = 401
    kind = "invalid_request_error"


class Authentication:
    """ASGI middleware. Every path but OPEN_PATHS needs one of `keys()`; the app finds it and its quota in the
    scope. Each POST takes a request from the quota.
    """

    def __init__(
        self,
        app: AsgiApp,
        keys: Callable[[], Keys],
        envelope_of: Callable[[str], Envelope],
        quotas: Quotas,
        metrics: Metrics,
    ) -> None:
        """`envelope_of` gives the error format of a path."""
        self._app = app
        self._keys = keys
        self._envelope_of = envelope_of
        self._quotas = quotas
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(ASSETS):
            try:
                self._admit(scope)
            except BatonError as error:
                await self._refuse(error, Exchange(scope, receive, send, self._envelope_of(scope["path"])))
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raises InvalidApiKey or RateLimited."""
        key = known(self._keys(), scope["headers"])
        if key is None:
            raise InvalidApiKey(
                "This API key is not known here; check it, or ask the operator for a new one."
                if presented(scope["headers"])
                else "An API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        scope["api_key"] = key
        scope["quota"] = quota = self._quotas.of(key.name, key.limits)
        if quota is not None and scope["method"] == "POST":
            quota.admit()

    async def _refuse(self, error: BatonError, exchange: Exchange) -> None:
        tally = self._metrics.begin(ROUTE)
        tally.status = error.status
        log.info(
            "refused request_id=%s status=%d client=%s key=%s",
            exchange.request_id, error.status, exchange.address, exchange.key_name or "unknown",
        )  # fmt: skip
        try:
            await exchange.answer_error(error)
        finally:
            self._metrics.end(tally)
