"""The seam between frontend and workers: one request out, a stream of replies back."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from baton.messages import Reply, Request

Respond = Callable[[Request], AsyncGenerator[Reply, None]]
"""What a worker serves: called once for each request; closing the generator cancels the work."""


class Transport(Protocol):
    """A request plane. Held to its contract by `tests/contract/test_transport.py`.

    * Everything ready for one peer in one turn of the event loop travels in ONE frame.
    * To cancel is to stop iterating: closing the caller's generator closes the worker's, over there too.
    * A `BatonError` raised by the worker arrives as the same class. Anything else arrives as EngineFailure.
    * A peer that dies ends each running call with WorkerLost at once (within 1 s); a peer that hangs, within
      the plane's liveness limit. The worker closes the generators of a caller that is gone.
    * Replies arrive in order, none lost, none twice.
    * A call of a GenerateRequest ends with DeadlineExceeded when its `deadline_s` is over, whoever hangs.
    """

    def serve(self, worker_id: str, respond: Respond) -> AbstractAsyncContextManager[str]:
        """Serve `respond` while the context is open; gives the address that goes into `WorkerInfo`."""
        ...

    def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        """Send `request` to a worker. Raises the BatonError it ends with; WorkerLost if it is not there."""
        ...

    async def close(self) -> None:
        """End every running call with WorkerLost and let go of every connection."""
        ...
