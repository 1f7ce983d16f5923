"""Monitors the engine from separate threads, since a blocked call into it can freeze the event loop."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from workers.engines.trtllm.library import fatal_error, is_healthy

log = logging.getLogger(__name__)

Leave = Callable[[int], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of TensorRT-LLM's blocking calls. Loading 65 GB from a slow disk takes half an hour."""

    load_s: float = 3600.0
    shut_down_s: float = 60.0
    health_s: float = 30.0
    poll_s: float = 0.5


@contextmanager
def leaving_after(limit_s: float, leave: Leave, doing: str) -> Generator[None, None, None]:
    """End the process with status 1 if the block takes longer: it may hang where signals do not reach it."""

    def give_up() -> None:
        log.error("%s has taken %g s, exiting", doing, limit_s)
        leave(1)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """Calls `on_broken` on the event loop if the executor recorded a fatal error, or a health check fails or
    hangs. If the loop itself is frozen, ends the process with status 1 through `leave`.
    """

    def __init__(
        self,
        llm: Any,
        on_broken: Callable[[str], None],
        *,
        leave: Leave,
        patience: Patience,
    ) -> None:
        self._llm = llm
        self._on_broken = on_broken
        self._leave = leave
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        # Polls without a sign of life: counted, not timed, so that a process that was suspended for a while
        # does not look frozen.
        self._loop_is_silent_for = 0
        self._health_is_silent_for = 0
        self._thread = threading.Thread(target=self._watch, daemon=True, name="trtllm-watchdog")
        self._thread.start()
        threading.Thread(target=self._ask, daemon=True, name="trtllm-health").start()

    def stop(self) -> None:
        """End the threads, except one that hangs in a health check."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        limit = self._patience.health_s / self._patience.poll_s
        while not self._stopped.wait(self._patience.poll_s):
            self._loop_is_silent_for += 1
            self._health_is_silent_for += 1
            if (error := fatal_error(self._llm)) is not None:
                self._tell(f"TensorRT-LLM recorded a fatal error: {error}")
            elif self._health_is_silent_for > limit:
                self._tell(f"TensorRT-LLM's health check did not end within {self._patience.health_s:g} s")
            self._in_loop(self._loop_turns)
            if self._loop_is_silent_for > limit:
                log.error("event loop frozen for %g s, exiting", self._patience.health_s)
                self._leave(1)

    def _ask(self) -> None:
        while not self._stopped.wait(4 * self._patience.poll_s):
            try:
                if not is_healthy(self._llm):
                    self._tell("TensorRT-LLM reports that it is unhealthy")
            except Exception as error:  # noqa: BLE001  a private check may raise anything
                self._tell(f"TensorRT-LLM's health check failed: {type(error).__name__}: {error}")
            self._health_is_silent_for = 0

    def _loop_turns(self) -> None:
        self._loop_is_silent_for = 0

    def _tell(self, reason: str) -> None:
        self._in_loop(lambda: self._on_broken(reason))

    def _in_loop(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: the process is exiting
            self._stopped.set()
