"""Pairs of workers between which no KV moves: left out, and tried again in the background."""

import asyncio
import logging
from collections.abc import Callable

from baton.messages import WorkerInfo
from baton.transport import Transport
from baton.trial import works

log = logging.getLogger(__name__)

FIRST_WAIT_S = 10.0
MAX_WAIT_S = 60.0
_TRIAL_S = 5.0


class CutPairs:
    """The pairs that requests avoid. `is_registered` tells whether a worker is still in discovery."""

    def __init__(self, transport: Transport, is_registered: Callable[[WorkerInfo], bool]) -> None:
        self._transport = transport
        self._is_registered = is_registered
        self._pairs: dict[tuple[str, str], tuple[str, asyncio.Task[None]]] = {}

    def add(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        """Avoid this pair until a trial succeeds: after FIRST_WAIT_S, then after twice as long each time."""
        if not self.has(prefill, decode):
            name = f"{prefill.worker_id} -> {decode.worker_id}"
            log.warning("cut pair %s", name)
            task = asyncio.create_task(self._try(prefill, decode, name))
            self._pairs[prefill.incarnation, decode.incarnation] = name, task

    def has(self, prefill: WorkerInfo, decode: WorkerInfo) -> bool:
        """Whether this pair is avoided."""
        return (prefill.incarnation, decode.incarnation) in self._pairs

    def names(self) -> list[str]:
        """The pairs, for /health."""
        return sorted(name for name, _ in self._pairs.values())

    @property
    def trials(self) -> list[asyncio.Task[None]]:
        """The tasks that try the pairs."""
        return [task for _, task in self._pairs.values()]

    async def _try(self, prefill: WorkerInfo, decode: WorkerInfo, name: str) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)
            is_gone = not (self._is_registered(prefill) and self._is_registered(decode))
            if is_gone or await works(self._transport, prefill, decode, limit_s=_TRIAL_S):
                break
        del self._pairs[prefill.incarnation, decode.incarnation]
        log.info("uncut pair %s registered=%s", name, not is_gone)
