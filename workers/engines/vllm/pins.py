"""Releases the KV that prefill keeps for decode when the call is closed, before vLLM's lease ends."""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

_ANSWER_S = 30.0
_AGAIN_S = 0.05
_MAX_TIMES = 40


class Releases:
    """Tells vLLM's processes which pins are over; ids that arrive meanwhile go with the next message."""

    def __init__(self) -> None:
        self._times_left: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, llm: Any, request_id: str) -> None:
        """Release the pin of vLLM's `request_id` in the background; harmless if it is no longer pinned."""
        self._times_left[request_id] = _MAX_TIMES
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(llm), name="release-kv")

    async def stop(self) -> None:
        """Leave the remaining pins to their leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send(self, llm: Any) -> None:
        while asked := self._times_left:
            self._times_left = {}
            try:
                answers = await llm.collective_rpc("release_kv", timeout=_ANSWER_S, args=(list(asked),))
            except Exception as error:  # noqa: BLE001  the engine is dead or slow: the lease frees them
                log.warning("pins not released num=%d error=%r", len(asked), error)
                continue
            again = {request_id for answer in answers for request_id in answer or ()}
            self._times_left |= {i: asked[i] - 1 for i in again if asked[i] > 1}
            if again:
                await asyncio.sleep(_AGAIN_S)  # their leases begin with vLLM's next step
