"""What is counted: bounded labels, each request once, times per token of one choice."""

import time

import pytest

from baton.messages import WorkerStats
from baton.telemetry import unauthenticated
from frontend.metrics import Metrics
from tests.registry import worker
from tests.scripted_workers import sampled

ROUTE = "/v1/x"
LABELS = {"route": ROUTE, "model": "m"}


def ended(**fields: object) -> Metrics:
    """The metrics after one request with these figures; it began a hundred seconds ago."""
    metrics = Metrics()
    tally = metrics.begin(ROUTE)
    assert sampled(metrics, "baton_running_requests", route=ROUTE) == 1
    tally.model = "m"
    tally.began_s = time.perf_counter() - 100
    for name, given in fields.items():
        setattr(tally, name, given)
    metrics.end(tally)
    assert sampled(metrics, "baton_running_requests", route=ROUTE) == 0
    return metrics


@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "token_s"), [(13, 1, 5), (26, 2, 5), (1, 1, None), (0, 1, None)]
)
def test_times_begin_with_the_request_and_tokens_of_a_choice_with_its_first(
    num_tokens: int, num_choices: int, token_s: float | None
) -> None:
    first_s = time.perf_counter() - 60
    metrics = ended(first_token_s=first_s, num_completion_tokens=num_tokens, num_choices=num_choices)
    assert sampled(metrics, "baton_request_duration_seconds_sum", **LABELS) == pytest.approx(100, abs=1)
    assert sampled(metrics, "baton_time_to_first_token_seconds_sum", **LABELS) == pytest.approx(40, abs=1)
    found = sampled(metrics, "baton_inter_token_latency_seconds_sum", **LABELS)
    assert found == (None if token_s is None else pytest.approx(token_s, abs=0.2))


def test_buckets_fit_what_is_measured() -> None:
    metrics = ended(first_token_s=time.perf_counter(), num_completion_tokens=2)
    for name, bound, labels in (
        ("inter_token_latency_seconds", "0.015", LABELS),
        ("time_to_first_token_seconds", "600.0", LABELS),
        ("request_moved_kv_bytes", "16384.0", {}),
        ("queue_seconds", "+Inf", {}),
    ):
        assert sampled(metrics, f"baton_{name}_bucket", le=bound, **labels) is not None


def test_messages_of_other_users_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "num_messages", 3)
    assert sampled(Metrics(), "baton_frontend_strange_messages") == 3


@pytest.mark.parametrize("num", [7, 0])
def test_tokens_repairs_and_disconnects_are_counted_and_leave_no_empty_series(num: int) -> None:
    repairs = {"bad_header": 2} if num else {}
    metrics = ended(status=499, disconnected=num > 0, num_prompt_tokens=num, repairs=repairs)
    assert sampled(metrics, "baton_requests_total", **LABELS, status="499") == 1
    assert sampled(metrics, "baton_prompt_tokens_total", model="m") == (num or None)
    assert sampled(metrics, "baton_disconnects_total", route=ROUTE) == (1 if num else None)
    assert sampled(metrics, "baton_harmony_repairs_total", kind="bad_header") == (2 if num else None)


def test_a_hundred_names_of_unknown_fields_are_kept_and_no_odd_ones() -> None:
    metrics = Metrics()
    metrics.count_ignored(["a b", "x" * 65, "ok\n", "é", ""])
    assert sampled(metrics, "baton_ignored_fields_total", field="other") == 5
    metrics.count_ignored(["x" * 64, *(f"messages[{i}].f" for i in range(99)), "one_more"])
    assert sampled(metrics, "baton_ignored_fields_total", field="x" * 64) == 1
    assert sampled(metrics, "baton_ignored_fields_total", field="messages[98].f") == 1
    assert sampled(metrics, "baton_ignored_fields_total", field="other") == 6


def test_the_page_adds_the_counts_of_processes_and_shows_each_workers_figures() -> None:
    first, second = ended(num_prompt_tokens=7), ended(num_prompt_tokens=5)
    third = ended(num_prompt_tokens=1, model='a"b\\c\nd')
    stats = WorkerStats(num_running=3, kv_move_s=0.5)
    page = second.page([(worker("p1"), stats)], [first.samples(), third.samples()]).decode().splitlines()
    assert "# TYPE baton_prompt_tokens_total counter" in page
    assert 'baton_prompt_tokens_total{model="m"} 12.0' in page
    assert r'baton_prompt_tokens_total{model="a\"b\\c\nd"} 1.0' in page
    assert 'baton_num_running{role="prefill",worker="p1"} 3.0' in page
    assert 'baton_kv_move_s{role="prefill",worker="p1"} 0.5' in page
