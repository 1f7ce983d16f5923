"""TensorRT-LLM's batch and queue: what fills them, and what does not."""

from typing import Any

from workers.engines.trtllm.calls import Call
from workers.engines.trtllm.figures import Figures

from baton.messages import WorkerStats
from tests.planes import a_request

VALUES: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "enable_attention_dp": False,
    "max_batch_size": 2,
    "max_queue_size": 1,
    "kv_cache_config.tokens_per_block": 2,
}


def open_call(*, is_pinned: bool = False) -> Call:
    result: Any = object()
    return Call(a_request(), result, deadline=0.0, is_pinned=is_pinned)


def test_pins_take_no_place_in_batch_and_queue() -> None:
    calls = {open_call(is_pinned=True) for _ in range(5)} | {open_call(), open_call()}
    figures = Figures(calls, VALUES)
    was_full = figures.is_full
    calls.add(open_call())
    assert (was_full, figures.is_full) == (False, True)
    stats = figures.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.kv_used_blocks, stats.kv_pinned_blocks) == (3 * 2, 5 * 2)  # 3 tokens each


def test_the_answer_takes_blocks_too() -> None:
    call = open_call()
    figures = Figures({call}, VALUES)
    used = [figures.stats().kv_used_blocks]
    call.cursor = 4
    assert [*used, figures.stats().kv_used_blocks] == [2, 4]


def test_under_attention_dp_each_rank_has_a_batch() -> None:
    calls = {open_call() for _ in range(8)}
    figures = Figures(calls, VALUES | {"enable_attention_dp": True})
    was_full = figures.is_full
    calls.add(open_call())
    assert (was_full, figures.is_full) == (False, True)


def test_the_stats_have_every_figure() -> None:
    call = open_call()
    figures = Figures({call}, VALUES | {"enable_attention_dp": True})
    assert figures.stats() == WorkerStats(num_running=1, kv_used_blocks=2)
    for _ in range(2):
        figures.count_prompt(call)
    figures.num_blocks, figures.num_handoffs, figures.num_handoffs_expired = 10, 4, 2
    figures.num_generated_tokens = 6
    assert figures.stats() == WorkerStats(
        num_running=1,
        kv_blocks=4 * 10,
        kv_used_blocks=2,
        num_prompt_tokens=2 * 3,
        num_generated_tokens=6,
        num_handoffs=4,
        num_handoffs_expired=2,
    )


def test_a_null_batch_size_is_tensorrt_llms_own() -> None:
    figures = Figures({open_call() for _ in range(2049)}, VALUES | {"max_batch_size": None})
    assert (figures.stats().num_running, figures.stats().num_waiting) == (2048, 1)
