"""What is counted: bounded labels, each request once, times per token of one choice."""

import time

import pytest

from baton.messages import Role, WorkerStats
from baton.telemetry import unauthenticated
from frontend.metrics import Metrics, Tally
from tests.registry import worker

ROUTE = "/v1/x"


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def ended(**fields: object) -> Metrics:
    """The metrics after one request that came to this; it began a hundred seconds ago."""
    metrics = Metrics()
    tally = metrics.begin(ROUTE)
    assert value(metrics, "baton_running_requests", route=ROUTE) == 1
    tally.model = "m"
    tally.began_s = time.perf_counter() - 100
    for name, given in fields.items():
        setattr(tally, name, given)
    metrics.end(tally)
    assert value(metrics, "baton_running_requests", route=ROUTE) == 0
    return metrics


def test_times_begin_with_the_request_and_tokens_with_the_first() -> None:
    metrics = ended(first_token_s=time.perf_counter() - 60, num_completion_tokens=13, num_choices=1)
    labels = {"route": ROUTE, "model": "m"}
    assert value(metrics, "baton_request_duration_seconds_sum", **labels) == pytest.approx(100, abs=1)
    assert value(metrics, "baton_time_to_first_token_seconds_sum", **labels) == pytest.approx(40, abs=1)
    assert value(metrics, "baton_inter_token_latency_seconds_sum", **labels) == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize(
    ("name", "bound", "labels"),
    [
        ("inter_token_latency_seconds", "0.015", {"route": ROUTE, "model": "m"}),
        ("time_to_first_token_seconds", "600.0", {"route": ROUTE, "model": "m"}),
        ("request_moved_kv_bytes", "16384.0", {}),
        ("queue_seconds", "600.0", {}),
    ],
)
def test_buckets_fit_what_is_measured(name: str, bound: str, labels: dict[str, str]) -> None:
    metrics = ended(first_token_s=time.perf_counter(), num_completion_tokens=2)
    assert value(metrics, f"baton_{name}_bucket", le=bound, **labels) is not None


def test_the_counts_of_several_processes_are_added() -> None:
    first, second = ended(num_prompt_tokens=7), ended(num_prompt_tokens=5)
    third = ended(num_prompt_tokens=1, model="other")
    samples = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in second.page(
            [(worker("p1"), WorkerStats(num_running=3))], [first.samples(), third.samples()]
        )
        .decode()
        .splitlines()
        if not line.startswith("#")
    }
    assert samples['baton_prompt_tokens_total{model="m"}'] == 12
    assert samples['baton_prompt_tokens_total{model="other"}'] == 1
    assert samples['baton_num_running{role="prefill",worker="p1"}'] == 3


def test_messages_of_strangers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(unauthenticated, "num_messages", 3)
    assert value(metrics, "baton_frontend_strange_messages") == 3


def test_choices_run_side_by_side_so_that_their_tokens_are_not_one_after_the_other() -> None:
    metrics = ended(first_token_s=time.perf_counter() - 60, num_completion_tokens=26, num_choices=2)
    found = value(metrics, "baton_inter_token_latency_seconds_sum", route=ROUTE, model="m")
    assert found == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_one_token_has_no_time_between_tokens(num_tokens: int) -> None:
    metrics = ended(first_token_s=time.perf_counter(), num_completion_tokens=num_tokens)
    assert not value(metrics, "baton_inter_token_latency_seconds_count", route=ROUTE, model="m")


def test_tokens_repairs_and_disconnects_are_counted() -> None:
    metrics = ended(
        status=499,
        disconnected=True,
        num_prompt_tokens=7,
        num_completion_tokens=5,
        repairs={"bad_header": 2, "no_end": 3},
    )
    assert value(metrics, "baton_requests_total", route=ROUTE, model="m", status="499") == 1
    assert value(metrics, "baton_disconnects_total", route=ROUTE) == 1
    assert value(metrics, "baton_prompt_tokens_total", model="m") == 7
    assert value(metrics, "baton_completion_tokens_total", model="m") == 5
    assert value(metrics, "baton_harmony_repairs_total", kind="bad_header") == 2
    assert value(metrics, "baton_harmony_repairs_total", kind="no_end") == 3


def test_a_request_that_never_got_a_prompt_leaves_no_empty_series() -> None:
    metrics = ended(status=400)
    assert value(metrics, "baton_prompt_tokens_total", model="m") is None
    assert not value(metrics, "baton_disconnects_total", route=ROUTE)
    assert not value(metrics, "baton_time_to_first_token_seconds_count", route=ROUTE, model="m")


def test_a_hundred_names_of_unknown_fields_are_kept_and_no_odd_ones() -> None:
    metrics = Metrics()
    metrics.count_ignored(["a b", "x" * 65, "ok\n", "é", ""])
    assert value(metrics, "baton_ignored_fields_total", field="other") == 5
    metrics.count_ignored(["x" * 64, *(f"messages[{i}].f" for i in range(99)), "one_more"])
    assert value(metrics, "baton_ignored_fields_total", field="x" * 64) == 1
    assert value(metrics, "baton_ignored_fields_total", field="messages[98].f") == 1
    assert value(metrics, "baton_ignored_fields_total", field="other") == 6
    metrics.count_ignored(["messages[98].f"])
    assert value(metrics, "baton_ignored_fields_total", field="messages[98].f") == 2


def test_the_page_shows_each_workers_figures_beside_the_frontends_own() -> None:
    metrics = ended()
    info = worker("p1")
    assert info.role is Role.PREFILL
    page = metrics.page([(info, WorkerStats(num_running=3, kv_move_s=0.5))]).decode()
    assert 'baton_num_running{role="prefill",worker="p1"} 3.0' in page
    assert 'baton_kv_move_s{role="prefill",worker="p1"} 0.5' in page
    assert "baton_requests_total" in page


def test_each_tally_is_its_own() -> None:
    first, second = (Tally(route=ROUTE, began_s=0.0) for _ in range(2))
    assert first.repairs == second.repairs == {}
    assert (first.status, first.num_choices) == (200, 1)
