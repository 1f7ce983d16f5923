"""Watches the engine from a thread of its own, for a blocked call into it can freeze the event loop."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from workers.engines.trtllm.library import fatal_error, is_healthy

log = logging.getLogger(__name__)

POLL_S = 0.5
# Turns of the poll; counted, not timed, so that a process that was stopped for a while does not look frozen.
_HEALTH_EVERY = 4
_FROZEN_AFTER = 60


class Watchdog:
    """Tells `on_broken`, on the event loop, once: what the executor has recorded, or a failed health check.

    If the loop does not turn any more, nobody could be told: the process ends with status 1 through `leave`.
    """

    def __init__(
        self, llm: Any, on_broken: Callable[[str], None], *, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._llm = llm
        self._on_broken = on_broken
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._num_unanswered = 0
        self._thread = threading.Thread(target=self._watch, daemon=True, name="trtllm-watchdog")
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        turn = 0
        while not self._stopped.wait(POLL_S):
            turn += 1
            error = fatal_error(self._llm)
            try:
                if error is not None:
                    self._loop.call_soon_threadsafe(self._on_broken, f"TensorRT-LLM recorded: {error}")
                elif turn % _HEALTH_EVERY == 0:
                    self._loop.call_soon_threadsafe(self._check)
            except RuntimeError:
                return  # the loop is closed: the process is on its way out
            self._num_unanswered += 1
            self._loop.call_soon_threadsafe(self._answer)
            if self._num_unanswered > _FROZEN_AFTER:
                log.error("event loop frozen for %g s, leaving", POLL_S * _FROZEN_AFTER)
                self._leave(1)

    def _answer(self) -> None:
        self._num_unanswered = 0

    def _check(self) -> None:
        try:
            healthy = is_healthy(self._llm)
        except Exception as error:  # noqa: BLE001  a private check may raise whatever it likes
            self._on_broken(f"TensorRT-LLM's health check failed: {type(error).__name__}: {error}")
            return
        if not healthy:
            self._on_broken("TensorRT-LLM says that it is not healthy")
