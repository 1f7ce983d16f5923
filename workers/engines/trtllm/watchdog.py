"""Monitors the engine from separate threads, since a blocked call into it can freeze the event loop."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from workers.engines.trtllm.library import fatal_error, is_healthy

log = logging.getLogger(__name__)

Leave = Callable[[int], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of TensorRT-LLM's blocking calls."""

    shut_down_s: float = 60.0
    health_s: float = 30.0
    poll_s: float = 0.5


class Watchdog:
    """Notices that the executor recorded a fatal error, or that a health check fails or hangs. If the event
    loop itself is frozen, ends the process with status 1 through `leave`."""

    def __init__(self, llm: Any, *, leave: Leave, patience: Patience) -> None:
        self._llm, self._leave, self._patience = llm, leave, patience
        self._stopped = threading.Event()
        self._problem = ""
        # Polls without a sign of life: counted, not timed, since a suspended process is not a frozen one.
        self._limit = patience.health_s / patience.poll_s
        self._loop_is_silent_for = self._health_is_silent_for = 0

    async def broken(self) -> str:
        """Watch until the LLM is broken; the reason."""
        for name, target in (("trtllm-loop", self._watch_loop), ("trtllm-health", self._check_health)):
            threading.Thread(target=target, daemon=True, name=name).start()
        try:
            while not self._problem:
                await asyncio.sleep(self._patience.poll_s)  # TensorRT-LLM does not notify
                self._loop_is_silent_for = 0
                self._health_is_silent_for += 1
                if (error := fatal_error(self._llm)) is not None:
                    return f"TensorRT-LLM recorded a fatal error: {error}"
                if self._health_is_silent_for > self._limit:
                    return f"TensorRT-LLM's health check did not end within {self._patience.health_s:g} s"
            return self._problem
        finally:
            self._stopped.set()

    def _watch_loop(self) -> None:
        while not self._stopped.wait(self._patience.poll_s):
            self._loop_is_silent_for += 1
            if self._loop_is_silent_for > self._limit:
                log.error("event loop frozen for %g s, exiting", self._patience.health_s)
                self._leave(1)

    def _check_health(self) -> None:
        while not self._stopped.wait(4 * self._patience.poll_s):
            try:
                if not is_healthy(self._llm):
                    self._problem = "TensorRT-LLM reports that it is unhealthy"
            except Exception as error:  # noqa: BLE001  a private check may raise anything
                self._problem = f"TensorRT-LLM's health check failed: {type(error).__name__}: {error}"
            self._health_is_silent_for = 0
