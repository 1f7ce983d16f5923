"""KV that prefill workers of Dynamo's hold until decode takes it."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from baton.dynamo.bodies import release_request
from baton.dynamo.calls import Call, Instance
from baton.errors import BatonError, WorkerUnreached
from baton.messages import GenerateRequest, KvHandoff
from baton.telemetry import Line

log = logging.getLogger(__name__)

_RELEASE_S = 60.0
"""How long a release may take: the decode worker may be full."""


class Handoffs:
    """Which ones decode has taken. If it takes one no more, because the client has left, a decode worker is
    asked for one token, which frees the KV.
    """

    def __init__(self, decodes: Callable[[str], Sequence[Instance]]) -> None:
        """`decodes`: the workers of a model that can take it."""
        self._decodes = decodes
        self._taken: set[int] = set()  # by identity
        self._releasing: set[asyncio.Task[None]] = set()

    @contextmanager
    def taking(self, handoff: KvHandoff | None) -> Iterator[None]:
        """A decode worker is asked for it; it is taken unless that worker is not reached."""
        self._taken.add(id(handoff))
        try:
            yield
        except WorkerUnreached:
            self._taken.discard(id(handoff))
            raise

    def release(self, request: GenerateRequest, prefill: Call) -> None:
        """Free what `prefill` hands over for this request, unless decode has taken it."""
        task = asyncio.get_running_loop().create_task(self._release(request, prefill))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self, limit_s: float) -> None:
        """Wait for what is being released."""
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=limit_s)
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _release(self, request: GenerateRequest, prefill: Call) -> None:
        await asyncio.wait([prefill.task])
        handoff = prefill.handoff
        if handoff is None or id(handoff) in self._taken:
            self._taken.discard(id(handoff))
            return
        asked = release_request(request, handoff, _RELEASE_S)
        for instance in self._decodes(request.model):
            try:
                call = instance.begin(asked)
                while await call.replies.take():
                    pass
            except WorkerUnreached:
                continue
            except BatonError as error:
                log.info(Line("handoff not released", request_id=request.request_id, error=error.message))
            return
