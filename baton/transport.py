"""The Transport protocol: one request to a worker, a stream of replies back."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.messages import Reply, Request

Respond = Callable[[Request], AsyncGenerator[Reply, None]]
"""A worker's handler, called once per request; closing the generator cancels the work."""


class Transport(Protocol):
    """A request plane. Contract: `tests/contract/test_transport.py`.

    * Everything that is ready for one peer in one turn of the event loop travels in ONE frame.
    * To cancel is to stop iterating: closing the caller's generator closes the worker's.
    * A `BatonError` raised by the worker arrives as the same class, any other exception as EngineFailure.
    * A worker that dies ends each running call with WorkerLost within 1 s; one that is silent, frozen or cut
      off, within the plane's liveness limit. The worker closes the generators of a dead caller, and those of
      a silent one after five times that limit.
    * On a plane with a broker, losing that ends each running call with BrokerLost; no worker is lost.
    * Replies arrive in order, none lost or repeated. Token chunks without log probabilities that are ready
      together may arrive as one.
    * A GenerateRequest ends with DeadlineExceeded after its `deadline_s`, even if a peer hangs."""

    def serve(self, worker_id: str, respond: Respond) -> AbstractAsyncContextManager[str]:
        """Serve `respond` while the context is open; yields the address for `WorkerInfo`."""
        ...

    def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        """Send `request` to a worker. Raises the BatonError it ends with; WorkerLost if the worker is
        unreachable, BrokerLost if the plane's broker is."""
        ...

    def lose(self, address: str, reason: str) -> None:
        """End every running call to a worker with WorkerLost."""
        ...

    @property
    def is_reachable(self) -> bool:
        """Whether workers can be called: no, if the plane has a broker and that is unreachable."""
        ...

    async def reachable(self) -> None:
        """Return when workers can be called."""
        ...

    async def close(self) -> None:
        """End every running call with WorkerLost and close all connections."""
        ...
