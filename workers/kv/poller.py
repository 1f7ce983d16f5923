"""A thread that owns something no other thread may touch, and polls it only while there is work."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

# Short against a transfer, long against a poll: 1 to 3 % of a core while polling, nothing when idle.
_POLL_PAUSE_S = 100e-6


class Poller:
    """Runs calls in order; in between calls `poll` every 0.1 ms for as long as it returns True."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str, poll: Callable[[], bool]) -> None:
        """Start the thread. `poll` must not raise."""
        self._thread = threading.Thread(target=self._run, args=(poll,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> "Future[T]":
        """Run `call(*args)` on the thread; the future has its result. Safe from any thread and finalizer."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 it belongs to who waits for the future
                future.set_exception(error)

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """Run what was submitted, end the thread and wait for it. Idempotent."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, poll: Callable[[], bool]) -> None:
        busy = False
        while True:
            try:
                # Not get(timeout=...): now and then CPython 3.11's waits for ever (measured).
                call = self._calls.get(block=not busy)
            except queue.Empty:
                time.sleep(_POLL_PAUSE_S)
            else:
                if call is None:
                    return
                call()
                del call  # else its arguments live on until the next one
            busy = poll()
