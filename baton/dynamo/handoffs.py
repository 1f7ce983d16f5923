"""KV that prefill workers of Dynamo's hold until decode takes it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from baton.dynamo.bodies import release_request
from baton.dynamo.calls import Call, Instance
from baton.errors import BatonError, WorkerUnreached
from baton.messages import GenerateRequest, KvHandoff, Reply
from baton.telemetry import Line

log = logging.getLogger(__name__)

_RELEASE_S = 60.0
"""How long a release may take: the decode worker may be full."""


class Handoffs:
    """Those that no decode worker has been asked for. If nobody will, because the client has left, one is
    asked for one token, which frees the KV.
    """

    def __init__(self, decodes: Callable[[str], Sequence[Instance]]) -> None:
        """`decodes`: the workers of a model that can take it."""
        self._decodes = decodes
        self._held: dict[int, KvHandoff] = {}  # by identity
        self._releasing: set[asyncio.Task[None]] = set()

    def hold(self, handoff: KvHandoff) -> None:
        """Prefill has answered with it."""
        self._held[id(handoff)] = handoff

    def claim(self, handoff: KvHandoff | None) -> bool:
        """Decode will take it; whether it was held here."""
        return self._held.pop(id(handoff), None) is not None

    def release(self, request: GenerateRequest, prefill: Call, handoff: KvHandoff | None) -> None:
        """Nobody reads what `prefill` answers to this request: the handoff, or one that follows."""
        task = asyncio.get_running_loop().create_task(self._release(request, prefill, handoff))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def close(self, limit_s: float) -> None:
        """Wait for what is being released."""
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=limit_s)
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def _release(self, request: GenerateRequest, prefill: Call, handoff: KvHandoff | None) -> None:
        if handoff is None:
            handoff = await _handoff_of(prefill)
        elif not self.claim(handoff):
            return
        if handoff is None:
            return
        asked = release_request(request, handoff)
        for instance in self._decodes(request.model):
            ask = replace(instance.ask(asked), name="release", limit_s=_RELEASE_S)
            try:
                await _read(instance.begin(ask))
            except WorkerUnreached:
                continue
            except BatonError as error:
                log.info(Line("handoff not released", request_id=request.request_id, error=error.message))
            return


async def _handoff_of(prefill: Call) -> KvHandoff | None:
    try:
        return next((each for each in await _read(prefill) if isinstance(each, KvHandoff)), None)
    except BatonError:
        return None  # prefill has handed nothing over


async def _read(call: Call) -> list[Reply]:
    """All replies. Raises the error that ended the call."""
    found: list[Reply] = []
    while replies := await call.replies.take():
        found += replies
    return found
