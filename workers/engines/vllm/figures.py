"""The engine's metrics: those that vLLM's scheduler reports after each step, and Baton's counters."""

from collections.abc import Callable
from typing import Any

from baton.messages import WorkerStats


class Figures:
    """One of vLLM's stat loggers, which calls `record` (duck-typed: vLLM gets it from a factory that it calls
    with its config and the index of an engine core).

    `on_failed_pull` is called when a transfer from a prefill worker has failed: vLLM does not say which, and
    for a hybrid model such as gpt-oss it decodes from whatever is in the blocks. The call precedes every
    token of that request. `pinned` counts the blocks that handoffs keep, by the id given to vLLM, which
    counts them as used.
    """

    def __init__(self, on_failed_pull: Callable[[], None]) -> None:
        self._on_failed_pull = on_failed_pull
        self.num_blocks = 0
        self.pinned: dict[str, int] = {}
        self.num_handoffs = 0
        self.num_handoffs_expired = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._num_running = 0
        self._num_waiting = 0
        self._usage = 0.0
        self._moved_bytes = 0
        self._move_s = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:  # noqa: ARG002  vLLM's
        """Record vLLM's SchedulerStats of one step, or None."""
        if scheduler_stats is None:
            return
        self._num_running = scheduler_stats.num_running_reqs
        self._num_waiting = scheduler_stats.num_waiting_reqs + getattr(
            scheduler_stats, "num_skipped_waiting_reqs", 0
        )
        self._usage = scheduler_stats.kv_cache_usage
        transfers = scheduler_stats.kv_connector_stats or {}
        self._moved_bytes += int(sum(transfers.get("bytes_transferred", ())))
        self._move_s += sum(transfers.get("transfer_duration", ()))
        if transfers.get("num_failed_transfers"):
            self._on_failed_pull()

    def log_engine_initialized(self) -> None:
        """Does nothing: the worker logs its own readiness."""

    def log(self) -> None:
        """Does nothing, as above."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Does nothing: Baton never puts an engine to sleep."""

    def stats(self) -> WorkerStats:
        """The worker's current stats."""
        num_pinned = sum(self.pinned.values())
        return WorkerStats(
            num_running=self._num_running,
            num_waiting=self._num_waiting,
            kv_blocks=self.num_blocks,
            kv_used_blocks=max(0, round(self._usage * self.num_blocks) - num_pinned),
            kv_pinned_blocks=num_pinned,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_handoffs=self.num_handoffs,
            num_handoffs_expired=self.num_handoffs_expired,
            num_cached_tokens=self.num_cached_tokens,
            kv_moved_bytes=self._moved_bytes,
            kv_move_s=self._move_s,
        )
