"""TensorRT-LLM's batch and queue: what fills them, and what does not."""

from typing import Any

from tests.planes import a_request
from workers.engines.trtllm.calls import Call
from workers.engines.trtllm.figures import Figures

VALUES: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "enable_attention_dp": False,
    "max_batch_size": 2,
    "kv_cache_config.tokens_per_block": 2,
}


def open_call(*, is_pinned: bool = False) -> Call:
    result: Any = object()
    return Call(a_request(), result, deadline=0.0, is_pinned=is_pinned)


def test_pins_take_no_place_in_batch_and_queue() -> None:
    calls = {open_call(is_pinned=True) for _ in range(5)} | {open_call(), open_call()}
    figures = Figures(calls, VALUES, max_queue_size=1)
    was_full = figures.is_full
    calls.add(open_call())
    assert (was_full, figures.is_full) == (False, True)
    stats = figures.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.kv_used_blocks, stats.kv_pinned_blocks) == (3 * 2, 5 * 2)  # 3 tokens each


def test_under_attention_dp_each_rank_has_a_batch() -> None:
    calls = {open_call() for _ in range(8)}
    figures = Figures(calls, VALUES | {"enable_attention_dp": True}, max_queue_size=1)
    was_full = figures.is_full
    calls.add(open_call())
    assert (was_full, figures.is_full) == (False, True)
