"""KV that prefill keeps for decode: given back when the call is closed, not at the end of vLLM's lease."""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

_RELEASE_S = 30.0


class Releases:
    """Tells vLLM's processes which pins are over; those that come while it does go with the next message."""

    def __init__(self) -> None:
        self._request_ids: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, llm: Any, request_id: str) -> None:
        """Release the pin of vLLM's `request_id`, in the background; no harm if it is none any more."""
        self._request_ids.append(request_id)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(llm), name="release-kv")

    async def done(self) -> None:
        """Wait until all are told."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _send(self, llm: Any) -> None:
        while self._request_ids:
            request_ids, self._request_ids = self._request_ids, []
            try:
                await llm.collective_rpc("release_kv", timeout=_RELEASE_S, args=(request_ids,))
            except Exception as error:  # noqa: BLE001  the engine is dead or slow: then the lease frees them
                log.warning("pins not released num=%d error=%r", len(request_ids), error)
