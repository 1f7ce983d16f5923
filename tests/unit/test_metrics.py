"""What is counted: bounded labels, each request once, times per token of one choice."""

import time
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.messages import TokenChunk, WorkerStats
from baton.telemetry import unauthenticated
from frontend.metrics import Metrics
from frontend.record import Record
from tests.registry import worker
from tests.scripted_workers import sampled

ROUTE = "/v1/x"
LABELS = {"route": ROUTE, "model": "m"}


def ended(**fields: object) -> Metrics:
    """The metrics after one request with these figures; it began a hundred seconds ago."""
    metrics = Metrics()
    record = metrics.begin(ROUTE)
    assert sampled(metrics, "baton_running_requests", route=ROUTE) == 1
    record.model = "m"
    record.began_s = time.perf_counter() - 100
    for name, given in fields.items():
        setattr(record, name, given)
    metrics.end(record)
    assert sampled(metrics, "baton_running_requests", route=ROUTE) == 0
    return metrics


def test_times_begin_with_the_request() -> None:
    metrics = ended(first_token_s=40.0)
    assert sampled(metrics, "baton_request_duration_seconds_sum", **LABELS) == pytest.approx(100, abs=1)
    assert sampled(metrics, "baton_time_to_first_token_seconds_sum", **LABELS) == 40


def test_each_time_between_two_chunks_is_counted() -> None:
    metrics = Metrics()
    gaps = metrics.gaps(Record(request_id="", route=ROUTE, model="m", at_s=0, began_s=0))
    for gap_ms in (7, 7, 40, 9000):
        gaps[gap_ms] += 1
    name = "baton_inter_token_latency_seconds"
    for bound, num in (("0.005", 0), ("0.01", 2), ("0.05", 3), ("2.5", 3), ("+Inf", 4)):
        assert sampled(metrics, f"{name}_bucket", le=bound, **LABELS) == num
    gaps[7] += 1  # it is the same object after a scrape
    assert sampled(metrics, f"{name}_count", **LABELS) == 5
    assert sampled(metrics, f"{name}_sum", **LABELS) == pytest.approx(9.0635, abs=0.001)


def test_stages_are_observed_with_how_they_ended() -> None:
    metrics = Metrics()
    record = metrics.begin(ROUTE)
    leg = record.leg()
    leg.on(worker("p1"))
    assert sampled(metrics, "baton_stage_requests", stage="prefill") == 1
    leg.failed("worker_lost")
    leg.on(worker("p1"))
    leg.failed("handoff_stalled")
    assert sampled(metrics, "baton_stage_requests", stage="queue") == 1
    leg.on(worker("p1"))
    leg.answered(TokenChunk((1,), None))
    assert sampled(metrics, "baton_stage_requests", stage="queue") == 0
    assert sampled(metrics, "baton_stage_requests", stage="stream") == 1
    leg.end(None)
    metrics.end(record)
    assert sampled(metrics, "baton_stage_requests", stage="stream") == 0
    count = partial(sampled, metrics, "baton_stage_seconds_count")
    assert (count(stage="prefill", outcome="worker_lost"), count(stage="stream", outcome="ok")) == (1, 1)
    for reason in ("worker_lost", "handoff_stalled", "ok"):
        assert sampled(metrics, "baton_attempts_total", reason=reason) == 1
    assert sampled(metrics, "baton_handoffs_stalled_total") == 1


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [({"status": 504, "code": "deadline_exceeded"}, "deadline_exceeded"), ({"status": 400}, "400"),
     ({"status": 499, "disconnected": True}, "disconnected")],
)  # fmt: skip
def test_the_stages_of_an_unfinished_attempt_ended_as_the_request_did(
    changes: dict[str, object], outcome: str
) -> None:
    metrics = Metrics()
    record = metrics.begin(ROUTE)
    leg = record.leg()
    leg.on(worker("p1"))
    for name, given in changes.items():
        setattr(record, name, given)
    leg.end(None)
    metrics.end(record)
    assert sampled(metrics, "baton_stage_seconds_count", stage="prefill", outcome=outcome) == 1
    assert sampled(metrics, "baton_attempts_total", reason=outcome) == 1


def test_requests_are_counted_by_the_name_of_their_key_for_admins_only() -> None:
    metrics = Metrics()
    records = [metrics.begin(ROUTE, "", caller) for caller in ("hog", "hog", "", *map(str, range(200)))]
    for record in records:
        record.leg()
    assert sampled(metrics, "baton_key_queued_requests", key="hog") == 2
    assert sampled(metrics, "baton_key_running_requests", key="none") == 1
    assert sampled(metrics, "baton_key_running_requests", key="other") == 101
    for record in records:
        metrics.end(record)
    assert sampled(metrics, "baton_key_queued_requests", key="hog") == 0
    assert sampled(metrics, "baton_key_requests_total", key="hog", status="200") == 2
    page = metrics.page([], with_keys=False).decode()
    assert "hog" not in page
    assert "key=" not in page


def test_messages_of_other_users_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "num_messages", 3)
    assert sampled(Metrics(), "baton_frontend_strange_messages") == 3
    assert sampled(Metrics(), "baton_unauthenticated_messages_total") == 3


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
    for name in ("num_running", "worker_running_requests"):
        assert f'baton_{name}{{role="prefill",worker="p1"}} 3.0' in page
    assert 'baton_kv_move_seconds_total{role="prefill",worker="p1"} 0.5' in page


def test_what_each_process_counts_of_the_fleet_is_not_added() -> None:
    first, second = Metrics(), Metrics()
    for metrics, num in ((first, 2), (second, 3)):
        metrics.of("workers", "decode", "live").value = 2
        metrics.of("workers_lost", "d1").value = num
        metrics.of("taken_places", "m", "queue").value = num
    page = first.page([], [second.samples()]).decode().splitlines()
    assert 'baton_workers{role="decode",state="live"} 2.0' in page
    assert 'baton_workers_lost_total{worker="d1"} 3.0' in page
    assert 'baton_taken_places{kind="queue",model="m"} 5.0' in page


def test_every_figure_of_a_worker_has_a_metric() -> None:
    stats = WorkerStats(**{name: number for number, name in enumerate(WorkerStats.__struct_fields__)})
    families = text_string_to_metric_families(Metrics().page([(worker("p1"), stats)]).decode())
    values = [s.value for f in families if not f.documentation.startswith("Ends with") for s in f.samples
              if s.labels == {"role": "prefill", "worker": "p1"}]  # fmt: skip
    assert sorted(values) == list(range(len(WorkerStats.__struct_fields__)))
