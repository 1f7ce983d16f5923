"""The engine's metrics, computed from its open calls: querying TensorRT-LLM's own takes up to 2 s."""

from collections.abc import Mapping, Set
from typing import Any

from baton.messages import WorkerStats
from workers.engines.queue_size import QUEUE_SIZE
from workers.engines.trtllm.calls import Call

_DEFAULT_BATCH_SIZE = 2048  # if null


class Figures:
    """Counters, and KV blocks estimated from the open calls: reused blocks count once per call.

    Under attention DP each rank has its own batch and KV pool; `num_blocks` is one rank's, as TensorRT-LLM
    reports it.
    """

    def __init__(self, calls: Set[Call], values: Mapping[str, Any]) -> None:
        self._num_ranks = int(values["tensor_parallel_size"]) if values["enable_attention_dp"] else 1
        self.num_slots = int(values["max_batch_size"] or _DEFAULT_BATCH_SIZE) * self._num_ranks
        self.max_queue_size = int(values[QUEUE_SIZE])
        self._tokens_per_block = int(values["kv_cache_config.tokens_per_block"])
        self._calls = calls
        self.num_blocks = 0
        self.num_handoffs = 0
        self.num_handoffs_expired = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether batch and queue are full."""
        return len(self._calls) - self._num_pinned >= self.num_slots + self.max_queue_size

    def count_prompt(self, call: Call) -> None:
        """Count the prompt of a call that ran it here."""
        self.num_prompt_tokens += len(call.request.token_ids)

    def stats(self) -> WorkerStats:
        """The worker's current stats."""
        num_open = len(self._calls) - self._num_pinned
        pinned = sum(self._num_blocks_of(call) for call in self._calls if call.is_pinned)
        return WorkerStats(
            num_running=min(num_open, self.num_slots),
            num_waiting=max(0, num_open - self.num_slots),
            kv_blocks=self.num_blocks * self._num_ranks,
            kv_used_blocks=sum(map(self._num_blocks_of, self._calls)) - pinned,
            kv_pinned_blocks=pinned,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_handoffs=self.num_handoffs,
            num_handoffs_expired=self.num_handoffs_expired,
        )

    @property
    def _num_pinned(self) -> int:
        return sum(call.is_pinned for call in self._calls)

    def _num_blocks_of(self, call: Call) -> int:
        return -(-call.num_tokens // self._tokens_per_block)
