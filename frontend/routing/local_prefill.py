"""When a decode worker computes a prompt itself, instead of a prefill worker."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from baton.messages import WorkerInfo


class LocalPrefill:
    """Prompts of which decode lacks at most `max_tokens` skip the prefill worker while that has kept a
    request of this process waiting for `after_s`; always if that is 0, never if `max_tokens` is 0.
    """

    def __init__(self, max_tokens: int = 0, after_s: float = 0.0) -> None:
        self.max_tokens = max_tokens
        self._after_s = after_s
        self._waits: dict[str, dict[object, float]] = {}  # since when, oldest first; by incarnation

    @contextmanager
    def waiting(self, prefill: WorkerInfo) -> Iterator[None]:
        """During the context a request waits for this worker's answer."""
        waits, wait = self._waits.setdefault(prefill.incarnation, {}), object()
        waits[wait] = time.perf_counter()
        try:
            yield
        finally:
            del waits[wait]
            if not waits:
                self._waits.pop(prefill.incarnation, None)

    def is_due(self, prefill: WorkerInfo) -> bool:
        """Whether a short prompt should not join those at this worker."""
        since = next(iter(self._waits.get(prefill.incarnation, {}).values()), time.perf_counter())
        return time.perf_counter() - since >= self._after_s
