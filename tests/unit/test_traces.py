"""The trace context of a request, which requests are traced, and the spans of a record."""

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from frontend.metrics import Metrics
from frontend.record import Attempt, Leg, Record, Stage, Trace
from frontend.traces import MAX_WAITING, Sender, Traces, sampler, spans_of
from tests.otlp import receiving
from tests.scripted_workers import sampled
from tests.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def begun(traces: Traces, *headers: tuple[str, str]) -> Trace:
    lines = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return traces.begin(dict(lines), lines)


def sending_nothing(records: Sequence[Record]) -> str:
    return ""


TRACES = Traces(sending_nothing)


@pytest.mark.parametrize(
    ("given", "is_sampled"),
    [
        (VALID, True),
        (VALID[:-2] + "00", False),
        (VALID[:-2] + "03", True),  # with W3C's flag for random ids
        (VALID[:-2] + "fe", False),
        ("cc" + VALID[2:], True),  # later versions may have more fields
        ("cc" + VALID[2:] + "-what-is-this", True),
    ],
)
def test_a_valid_traceparent_is_the_parent(given: str, is_sampled: bool) -> None:
    trace = begun(TRACES, ("host", "x"), ("traceparent", given), ("tracestate", "a=1"), ("accept", "*/*"))
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, SPAN, is_sampled)
    assert trace.span_id not in {SPAN, begun(TRACES, ("traceparent", given)).span_id}
    flag = "01" if is_sampled else "00"
    assert trace.headers == {"traceparent": f"00-{TRACE}-{trace.span_id}-{flag}", "tracestate": "a=1"}


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00",
        VALID[:-1],
        VALID + "0",
        VALID + "-",
        VALID + "-01",
        "ff" + VALID[2:],
        "FF" + VALID[2:],
        "0" + VALID,
        "cc" + VALID[2:] + ".what",
        VALID.upper(),
        VALID.replace("-", "_"),
        VALID.replace("4bf9", "4bg9"),
        VALID.replace(TRACE, "0" * 32),
        VALID.replace(SPAN, "0" * 16),
        VALID.replace(TRACE, TRACE[:-1]),
        VALID.replace(SPAN, SPAN + "0"),
        VALID[:-2] + "xy",
        VALID + "\xff",
        "<script>",
    ],
)
def test_a_malformed_traceparent_begins_a_new_trace(given: str) -> None:
    trace = begun(TRACES, ("traceparent", given), ("tracestate", "a=1"))
    assert trace.trace_id != TRACE
    assert (trace.parent_id, trace.state, len(trace.trace_id), len(trace.span_id)) == ("", "", 32, 16)


def test_of_repeated_headers_two_parents_are_ignored_and_states_are_joined() -> None:
    parent, other = ("traceparent", VALID), ("x", "y")
    assert begun(TRACES, parent, parent).parent_id == ""
    assert begun(TRACES, other, other, parent).parent_id == SPAN
    states = [("tracestate", "a=1"), ("tracestate", "b=2")]
    assert begun(TRACES, parent, *states).state == "a=1,b=2"
    for state in ("a" * 513, "a=\x00", "a=\xff"):
        assert begun(TRACES, parent, ("tracestate", state)).state == ""


@pytest.mark.parametrize(
    ("name", "share", "expected"),
    [
        ("", "", (True, 1.0)),
        ("always_on", "", (False, 1.0)),
        ("ALWAYS_OFF", "", (False, 0.0)),
        ("parentbased_always_off", "0.7", (True, 0.0)),
        ("traceidratio", "0.25", (False, 0.25)),
        ("parentbased_traceidratio", "0.5", (True, 0.5)),
        ("traceidratio", "", (False, 1.0)),
        ("traceidratio", "2", (True, 1.0)),
        ("traceidratio", "nan", (True, 1.0)),
        ("traceidratio", "half", (True, 1.0)),
        ("jaeger_remote", "", (True, 1.0)),
    ],
)
def test_opentelemetrys_variables_say_what_is_traced(
    name: str, share: str, expected: tuple[bool, float], caplog: pytest.LogCaptureFixture
) -> None:
    assert sampler({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": share}) == expected
    assert ("OTEL_TRACES_SAMPLER" in caplog.text) == (share in {"2", "nan", "half"} or name[:1] == "j")


def test_a_share_of_the_traces_is_sampled_by_the_id() -> None:
    traces = Traces(sending_nothing, follows_client=False, share=0.25)
    assert 150 < sum(begun(traces).is_sampled for _ in range(1000)) < 350
    low, high = (VALID.replace(TRACE, "f" * 16 + half * 16) for half in "3c")
    assert begun(traces, ("traceparent", low[:-2] + "00")).is_sampled
    assert not begun(traces, ("traceparent", high)).is_sampled


def stages(**seconds: float) -> dict[Stage, float]:
    found: dict[Stage, float] = seconds  # type: ignore[assignment]  # names of stages
    return found


LOST = Attempt(
    began_s=0.2,
    prefill="prefill-0",
    decode="decode-0",
    stages=stages(transit=0.02, prefill=0.2, prefill_wait=0.05, kv_move=0.03),
    outcome="worker_lost",
)
AGAIN = Attempt(began_s=3.0, decode="decode-1", stages=stages(prefill=0.5, decode_wait=0.1))
RECORD = Record(
    request_id="r-1",
    route="/v1/chat/completions",
    at_s=1_800_000_000.0,
    began_s=7.0,
    model="gpt",
    caller="alice",
    stages=stages(read=0.04, render=0.06, send=0.05),
    # 0.1 s for a place; 2 s until decode-0 was lost, and 0.5 s for a worker; 1.35 s until the end.
    legs=[Leg(began_s=7.0, attempts=[LOST, AGAIN], stages=stages(queue=0.6, stream=3.35))],
    duration_s=5.0,
    first_token_s=0.5,
    num_prompt_tokens=5,
    num_completion_tokens=9,
    trace=Trace(TRACE, "1" * 16, SPAN, "a=1"),
)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return tuple(round(time / 1e9 - 1_800_000_000, 3) for time in (span.start_time, span.end_time))  # type: ignore[return-value]  # two


def test_the_spans_of_a_request_that_lost_a_worker() -> None:
    *parts, request = spans_of(RECORD, Resource({}), {"server.address": "127.0.0.1"})
    attempts = [span for span in parts if span.name == "attempt"]
    inner = {span.context.span_id: span for span in attempts if span.context is not None}
    rows = [(span.name, *seconds(span), inner.get(span.parent.span_id)) for span in parts if span.parent]
    first, second = attempts
    assert rows == [
        ("read", 0, 0.04, None),
        ("render", 0.04, 0.1, None),
        ("queue", 0.1, 0.2, None),
        ("prefill_wait", 0.2, 0.25, first),
        ("prefill", 0.25, 0.45, first),
        ("kv_move", 0.45, 0.48, first),
        ("transit", 0.48, 0.5, first),
        ("attempt", 0.2, 0.5, None),
        ("stream", 0.5, 2.5, None),
        ("queue", 2.5, 3.0, None),
        ("prefill", 3.0, 3.5, second),
        ("decode_wait", 3.5, 3.6, second),
        ("attempt", 3.0, 3.6, None),
        ("stream", 3.6, 4.95, None),
        ("send", 4.95, 5.0, None),
    ]
    assert [span.status.status_code for span in attempts] == [StatusCode.ERROR, StatusCode.UNSET]
    assert (first.attributes or {})["error.type"] == "worker_lost"
    assert (first.attributes or {})["baton.worker.decode"] == "decode-0"
    workers = [(span.attributes or {}).get("baton.worker") for span in parts if span.name == "prefill"]
    assert workers == ["prefill-0", "decode-1"]
    assert (request.name, request.kind, seconds(request)) == ("chat gpt", SpanKind.SERVER, (0, 5.0))
    assert request.parent is not None
    assert request.context is not None
    assert f"{request.parent.span_id:016x} {request.context.span_id:x}" == f"{SPAN} {'1' * 16}"
    assert request.context.trace_state.get("a") == "1"
    known = dict(request.attributes or {})
    assert {"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 9}.items() <= known.items()
    assert "error.type" not in known


@pytest.mark.parametrize(
    ("status", "code", "kind", "is_failure"),
    [
        (200, "", None, False),
        (429, "overloaded", "overloaded", False),
        (499, "", "499", False),
        (504, "deadline_exceeded", "deadline_exceeded", True),
    ],
)
def test_a_failed_request_has_an_error_type(
    status: int, code: str, kind: str | None, is_failure: bool
) -> None:
    record = Record(request_id="r", route="/tokenize", at_s=1, began_s=0, status=status, code=code)
    record.trace = Trace("a" * 32, "b" * 16)
    (span,) = spans_of(record, Resource({}), {})
    assert (span.name, span.parent) == ("/tokenize", None)
    assert (span.attributes or {}).get("error.type") == kind
    assert (span.status.status_code is StatusCode.ERROR) == is_failure


def test_traces_that_nobody_takes_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    going_on, reason = threading.Event(), "no reader"

    def send(records: Sequence[Record]) -> str:
        going_on.wait()
        return reason

    metrics = Metrics()
    traces = Traces(send)
    traces.report_to(metrics)
    traces.add(RECORD)
    wait_for(lambda: not traces._waiting)  # noqa: SLF001  the thread has it
    for _ in range(MAX_WAITING + 5):
        traces.add(RECORD)
    going_on.set()
    wait_for(lambda: traces.lost["not_sent"] == MAX_WAITING + 1)
    assert sampled(metrics, "baton_lost_traces_total", reason="queue_full") == 5
    assert sampled(metrics, "baton_lost_traces_total", reason="not_sent") == MAX_WAITING + 1
    assert caplog.text.count("no reader") == 1
    reason = ""
    traces.add(RECORD)
    traces.close()
    assert caplog.text.count("traces are sent again") == 1


def test_a_receiver_that_is_down_gives_a_reason_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    with receiving() as receiver:
        receiver.status = 401
        assert "401" in Sender(receiver.url, "127.0.0.1", 80)([RECORD])
    down = receiver.url.replace("//", "//me:secret@")
    reason = Sender(f"{down}/", "127.0.0.1", 80)([RECORD])
    assert reason
    assert "secret" not in reason


def test_an_endpoint_may_have_the_path_of_traces_or_not() -> None:
    with receiving() as receiver:
        for end in ("", "/", "/v1/traces", "/v1/traces/"):
            assert Sender(receiver.url + end, "127.0.0.1", 80)([RECORD]) == ""
        assert receiver.paths == {"/v1/traces"}
        assert len(receiver.spans) == 4 * 16
