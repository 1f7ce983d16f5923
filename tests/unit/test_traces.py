"""The trace context of a request, which requests are traced, and the spans of a record."""

import re

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from frontend.record import Attempt, Leg, Record, Stage, Trace
from frontend.traces import Traces, spans_of
from tests.otlp import receiving

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def traces() -> Traces:
    return Traces("http://127.0.0.1:1", {})


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        (VALID, "01"),
        (VALID[:-2] + "00", "00"),
        ("cc" + VALID[2:] + "-what-is-this", "01"),  # later versions may have more fields
    ],
)
def test_a_valid_traceparent_is_the_parent(traces: Traces, given: str, flags: str) -> None:
    trace = traces.begin(given)
    assert (trace.parent_id, trace.own[-2:]) == (SPAN, flags)
    assert trace.own[:36] == VALID[:36]
    assert len({trace.own, traces.begin(given).own, VALID}) == 3


@pytest.mark.parametrize(
    "given", ["", VALID[:-1], VALID.replace(SPAN, "0" * 16), VALID + "\xff", f"cc{VALID[2:]}-" + "x" * 60_000]
)
def test_a_malformed_traceparent_begins_a_new_trace(traces: Traces, given: str) -> None:
    trace = traces.begin(given)
    assert (TRACE in trace.own, trace.parent_id) == (False, "")
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace.own)


def test_opentelemetrys_variables_choose_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    traces = Traces("http://127.0.0.1:1", {})
    assert 150 < sum(traces.begin("").own.endswith("01") for _ in range(1000)) < 350
    low, high = (VALID.replace(TRACE, "f" * 16 + half * 16) for half in "3c")
    assert traces.begin(low[:-2] + "00").own.endswith("01")
    assert traces.begin(high).own.endswith("00")


def stages(**seconds: float) -> dict[Stage, float]:
    found: dict[Stage, float] = seconds  # type: ignore[assignment]  # names of stages
    return found


LOST = Attempt(
    prefill="prefill-0",
    decode="decode-0",
    stages=stages(queue=0.1, transit=0.02, prefill=0.2, prefill_wait=0.05, kv_move=0.03, stream=2.0),
    outcome="worker_lost",
)
AGAIN = Attempt(decode="decode-1", stages=stages(queue=0.5, prefill=0.5, decode_wait=0.1, stream=1.35))
RECORD = Record(
    request_id="r-1",
    route="/v1/chat/completions",
    at_s=1_800_000_000.0,
    began_s=7.0,
    model="gpt",
    caller="alice",
    stages=stages(read=0.04, render=0.06, send=0.05),
    # 0.1 s for a place; 2 s until decode-0 was lost, and 0.5 s for a worker; 1.35 s until the end.
    legs=[Leg(attempts=[LOST, AGAIN])],
    duration_s=5.0,
    first_token_s=0.5,
    num_prompt_tokens=5,
    num_completion_tokens=9,
    trace=Trace(f"00-{TRACE}-{'1' * 16}-01", SPAN),
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
        ("stream", 0.5, 2.5, first),
        ("attempt", 0.2, 2.5, None),
        ("queue", 2.5, 3.0, None),
        ("prefill", 3.0, 3.5, second),
        ("decode_wait", 3.5, 3.6, second),
        ("stream", 3.6, 4.95, second),
        ("attempt", 3.0, 4.95, None),
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
    known = dict(request.attributes or {})
    assert {"gen_ai.operation.name": "chat", "gen_ai.usage.output_tokens": 9}.items() <= known.items()
    assert "error.type" not in known


@pytest.mark.parametrize(
    ("status", "code", "kind", "is_error"),
    [
        (200, "", None, False),
        (429, "overloaded", "overloaded", False),
        (499, "", "499", False),
        (504, "deadline_exceeded", "deadline_exceeded", True),
    ],
)
def test_a_failed_request_has_an_error_type(status: int, code: str, kind: str | None, is_error: bool) -> None:
    record = Record(
        request_id="r", route="/v1/responses/input_tokens", at_s=1, began_s=0, status=status, code=code
    )
    record.trace = Trace(f"00-{'a' * 32}-{'b' * 16}-01")
    (span,) = spans_of(record, Resource({}), {})
    assert (span.name, span.parent) == ("/v1/responses/input_tokens", None)
    assert (span.attributes or {}).get("error.type") == kind
    assert (span.status.status_code is StatusCode.ERROR) == is_error


def test_traces_that_nobody_takes_are_warned_of_once_without_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    with receiving() as receiver:
        receiver.status = 401
        traces = Traces(f"{receiver.url.replace('//', '//me:secret@')}/", {})
        for _ in range(100):
            traces.add(RECORD)
        traces.close()
    assert receiver.num_asked >= 1
    assert len(caplog.messages) == 1
    assert "secret" not in caplog.text


def test_an_endpoint_may_have_the_path_of_traces_or_not() -> None:
    with receiving() as receiver:
        for end in ("", "/", "/v1/traces", "/v1/traces/"):
            traces = Traces(receiver.url + end, {})
            traces.add(RECORD)
            traces.close()
        assert receiver.paths == {"/v1/traces"}
        assert len(receiver.spans) == 4 * 16
