"""The ASGI app of one route: failures become error responses, and every request is counted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.errors import NotReady
from frontend.http.errors import Envelope, ErrorBody, as_baton_error
from frontend.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from frontend.http.services import Services
from frontend.metrics import Tally

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
# Extra time beyond the request's deadline for the error to reach the client.
GRACE_S = 30.0
# Time to send the shutdown error once the drain timeout has cancelled a request.
GOODBYE_S = 1.0
SHUTTING_DOWN = NotReady("The server is shutting down; try again.", retry_after_s=1)

Serve = Callable[[Exchange, Services, Tally], Awaitable[None]]
"""Serves a request. Its exceptions become error responses."""


class Endpoint:
    """The ASGI app of one route. Failures become error responses and are counted by route."""

    def __init__(
        self, route: str, serve: Serve, services: Services, envelope: Envelope = ErrorBody.of
    ) -> None:
        self._envelope = envelope
        self._route = route
        self._serve = serve
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send, self._envelope)
        tally = self._services.metrics.begin(self._route)
        try:
            await self._respond(exchange, tally)
        except ClientGone:
            tally.disconnected = True
            log.info("client gone request_id=%s route=%s", exchange.request_id, self._route)
        finally:
            if tally.disconnected:
                tally.status = CLIENT_GONE_STATUS
            self._services.metrics.end(tally)

    async def _respond(self, exchange: Exchange, tally: Tally) -> None:
        services = self._services
        try:
            async with asyncio.timeout(services.request_timeout_s + GRACE_S):
                await self._serve(exchange, services, tally)
        except ClientGone:
            raise
        except asyncio.CancelledError:
            tally.status = SHUTTING_DOWN.status
            if not exchange.started:
                async with asyncio.timeout(GOODBYE_S):
                    await exchange.answer_error(SHUTTING_DOWN)
            raise
        except Exception as error:  # noqa: BLE001 every failure becomes an error response
            # In its own function: a local variable with the error would be a reference cycle through its
            # traceback, which keeps the request's body in memory until garbage collection.
            await _report(error, exchange, tally)


async def _report(error: Exception, exchange: Exchange, tally: Tally) -> None:
    failure = as_baton_error(error, exchange.request_id)
    tally.status = failure.status
    log.info("refused request_id=%s status=%d code=%s", exchange.request_id, failure.status, failure.code)
    if exchange.started:
        # The client has not read for the whole grace period.
        raise ClientGone from None
    await exchange.answer_error(failure)
