"""Imports of large libraries, and signals while an engine loads and blocks the event loop."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def dying_at_once() -> Iterator[None]:
    """Let signals end the process directly: the blocked loop cannot handle them, and there is nothing to
    drain.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def importing() -> Iterator[None]:
    """Pause garbage collection: it frees nothing during imports, and takes a fifth of torch's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
