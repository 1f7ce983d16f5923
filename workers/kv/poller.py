"""A thread that exclusively owns an object and polls it only while there is work."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

Poll = Callable[[], float | None]
"""Returns the seconds until the next poll, None if only a new call can create work. Never raises."""


class Poller:
    """Runs calls in order and, between them, the poll function as often as it asks."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str, poll: Poll) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, args=(poll,), name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> "Future[T]":
        """Run `call(*args)` on the thread; the future gets its result. Safe from any thread and finalizer."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 passed on by the future
                future.set_exception(error)

        self._calls.put(run)
        return future

    def stop(self) -> None:
        """Run all submitted calls, then end the thread and join it. Idempotent."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _run(self, poll: Poll) -> None:
        pause_s: float | None = None
        while True:
            try:
                # Not get(timeout=...), which occasionally waits forever in CPython 3.11 (measured).
                call = self._calls.get(block=pause_s is None)
            except queue.Empty:
                time.sleep(pause_s or 0)  # UCX must be polled: it sends no notifications
            else:
                if call is None:
                    return
                call()
                del call  # otherwise its arguments stay alive until the next one
            pause_s = poll()
