"""Handoff ids: 64 bits, unique across prefill workers and their restarts."""

import secrets
import time
from collections.abc import Callable

_EPOCH_MS = 1_735_689_600_000  # 2025-01-01: 39 bits last until 2042
_MACHINE_BITS = 14
_COUNTER_BITS = 10


class HandoffIds:
    """From the highest bit below the sign: milliseconds (39 bits), a random part per incarnation (14), a
    counter (10). Equal ids would mix the KV of two requests; TensorRT-LLM reserves ids below 2^40.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._machine = secrets.randbits(_MACHINE_BITS)
        self._counter = secrets.randbits(_COUNTER_BITS)
        self._last_ms = 0
        self._num_in_ms = 0

    def next(self) -> int:
        """A new id, even if the clock stands still or goes back."""
        now_ms = self._now_ms() - _EPOCH_MS
        if now_ms > self._last_ms:
            self._last_ms, self._num_in_ms = now_ms, 0
        elif self._num_in_ms == 1 << _COUNTER_BITS:
            self._last_ms, self._num_in_ms = self._last_ms + 1, 0
        self._num_in_ms += 1
        self._counter = (self._counter + 1) % (1 << _COUNTER_BITS)
        return (
            self._last_ms << (_MACHINE_BITS + _COUNTER_BITS) | self._machine << _COUNTER_BITS | self._counter
        )
