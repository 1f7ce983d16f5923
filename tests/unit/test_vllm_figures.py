"""What the vLLM worker reports: the scheduler's last step, the transfers so far, and Baton's counters."""

from types import SimpleNamespace
from typing import Any

import pytest
from workers.engines.vllm.figures import Figures

from baton.messages import WorkerStats


def step(transfers: dict[str, Any] | None = None, **figures: float) -> Any:
    """vLLM's SchedulerStats."""
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0, "kv_cache_usage": 0.0}
    return SimpleNamespace(**idle | figures, kv_connector_stats=transfers)


def test_the_stats_have_every_figure() -> None:
    figures = Figures(lambda: None)
    assert figures.stats() == WorkerStats()
    figures.num_blocks, figures.pinned = 100, {"r1": 5, "r2": 6}
    figures.num_handoffs, figures.num_handoffs_expired = 2, 3
    figures.num_prompt_tokens, figures.num_cached_tokens, figures.num_generated_tokens = 40, 50, 60

    figures.record(step(num_running_reqs=7, num_waiting_reqs=8, kv_cache_usage=0.5), None)
    figures.record(None, None, engine_idx=0)  # a step without stats changes nothing

    assert figures.stats() == WorkerStats(
        num_running=7,
        num_waiting=8,
        kv_blocks=100,
        kv_used_blocks=50 - 11,
        kv_pinned_blocks=11,
        num_prompt_tokens=40,
        num_generated_tokens=60,
        num_handoffs=2,
        num_handoffs_expired=3,
        num_cached_tokens=50,
    )


def test_requests_that_vllm_skips_wait_too() -> None:
    figures = Figures(lambda: None)
    figures.record(step(num_waiting_reqs=1, num_skipped_waiting_reqs=2), None)
    assert figures.stats().num_waiting == 3


def test_transfers_are_summed_over_steps() -> None:
    figures = Figures(pytest.fail)
    for transfers in (
        {"bytes_transferred": [10, 20], "transfer_duration": [0.25, 0.5]},
        None,
        {"bytes_transferred": [30], "transfer_duration": [1.0], "num_failed_transfers": []},
    ):
        figures.record(step(transfers), None)
    assert figures.stats() == WorkerStats(kv_moved_bytes=60, kv_move_s=1.75)


def test_a_failed_transfer_is_told_at_its_step() -> None:
    failed: list[bool] = []
    figures = Figures(lambda: failed.append(True))
    figures.record(step({"num_failed_transfers": []}), None)
    assert not failed
    figures.record(step({"num_failed_transfers": [1]}), None)
    assert failed == [True]


def test_pins_that_vllm_does_not_report_yet_leave_no_negative_use() -> None:
    figures = Figures(lambda: None)
    figures.num_blocks = 100
    figures.pinned["r1"] = 5
    stats = figures.stats()
    assert (stats.kv_used_blocks, stats.kv_pinned_blocks) == (0, 5)
