"""Ids of handoffs: 64 bits, never the same on two prefill workers or in two lives of one."""

import secrets
import time
from collections.abc import Callable

_EPOCH_MS = 1_735_689_600_000  # 2025-01-01: 39 bits last until 2042
_MACHINE_BITS = 14
_COUNTER_BITS = 10


class HandoffIds:
    """Milliseconds (39 bits), a random part of this incarnation (14), a counter (10), from the highest bit
    but the sign. Two with the same id would mix the KV of two requests; TensorRT-LLM keeps ids below 2^40
    for itself.
    """

    def __init__(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._now_ms = now_ms
        self._machine = secrets.randbits(_MACHINE_BITS)
        self._counter = secrets.randbits(_COUNTER_BITS)
        self._last_ms = 0
        self._num_in_ms = 0

    def next(self) -> int:
        """An id that was never given before, even if the clock stands still or goes back."""
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
