"""Spans of requests at a real receiver: whole traces, and a receiver that hangs."""

import json
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.otlp import Receiver, attributes, lasted_s, receiving
from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S, wait_for

CANARY = "marzipan-7341"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "/v1/chat/completions"
TIMED: dict[str, Any] = {"stream": True, "stream_options": {"include_timings": True}, "ignore_eos": True}
ENVIRON = {
    "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    "OTEL_BSP_SCHEDULE_DELAY": "500",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=tests",
    "OTEL_TRACES_SAMPLER": "parentbased_always_off",
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Stack]:
    """A frontend that traces requests whose client does."""
    with Stack(tmp_path_factory.mktemp("stack"), ENVIRON) as stack:
        stack.serve("prefill", "decode", engine="mocker", flags=("--otlp-endpoint", receiver.url))
        yield stack


def asked(
    stack: Stack, trace_id: str, path: str = CHAT, timeout_s: float = PATIENCE_S, **fields: Any
) -> httpx.Response:
    """A request with this trace, or without one."""
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"} if trace_id else {}
    chat = {"messages": [{"role": "user", "content": f"Say {CANARY}"}]} if path == CHAT else {}
    body = {"model": MODEL, **chat, **fields}
    return httpx.post(f"{stack.url}{path}", json=body, headers=headers, timeout=timeout_s, verify=False)


def children(parent: Span, spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.parent_span_id == parent.span_id]


def test_a_request_is_one_trace_below_its_clients(stack: Stack, receiver: Receiver) -> None:
    assert asked(stack, "", max_tokens=5).status_code == 200  # not sampled
    reply = asked(stack, TRACE, max_tokens=20, **TIMED)
    wait_for(lambda: receiver.trace(TRACE))
    (request,) = (span for span in receiver.trace(TRACE) if span.kind == Span.SPAN_KIND_SERVER)
    parts = [span for span in receiver.trace(TRACE) if span != request]
    assert request.parent_span_id.hex() == PARENT
    assert request.name == f"chat {MODEL}"
    known = attributes(request)
    assert known["gen_ai.usage.output_tokens"] == 20
    assert known["baton.request_id"] == reply.headers["x-request-id"]
    assert known["server.port"] == stack.port
    stages = children(request, parts)
    (attempt,) = (span for span in stages if span.name == "attempt")
    inner = children(attempt, parts)
    assert len(stages) + len(inner) == len(parts), "each span has its parent"
    assert {"read", "render", "queue", "attempt"} <= {span.name for span in stages}
    assert {"prefill", "stream"} <= {span.name for span in inner}
    for whole, pieces in ((request, stages), (attempt, inner)):
        for before, after in pairwise(pieces):
            assert abs(after.start_time_unix_nano - before.end_time_unix_nano) < 1e6
        assert lasted_s(*pieces) == pytest.approx(lasted_s(whole), rel=0.05, abs=0.005)
    timings = json.loads(reply.text.split("data: ")[-2])["timings"]
    told_s = sum(timings["stages"].values()) / 1000
    assert told_s == pytest.approx(lasted_s(request), rel=0.05, abs=0.02)
    assert not any(CANARY.encode() in body for body in receiver.bodies)
    assert any(b"deployment.environment.name" in body for body in receiver.bodies)
    assert all(span.trace_id.hex() == TRACE for span in receiver.spans), "others are not sampled"


def test_a_receiver_that_hangs_slows_neither_requests_nor_the_end(stack: Stack, receiver: Receiver) -> None:
    receiver.go_on.clear()
    num_asked = receiver.num_asked
    for number in range(3):
        assert asked(stack, f"{number + 1:032x}", max_tokens=5).status_code == 200
    wait_for(lambda: receiver.num_asked > num_asked)
    assert asked(stack, "b" * 32, max_tokens=5).status_code == 200
    frontend = stack.processes[0]
    frontend.signal(signal.SIGTERM)
    assert frontend.wait() == 0
    assert not receiver.go_on.is_set(), "it still hangs"
    assert 1 <= frontend.text().count("WARNING frontend.traces") <= 2  # one, and one at the end
    assert CANARY not in frontend.text()
    assert "Traceback" not in frontend.text()
    assert not receiver.trace("b" * 32)


def test_without_the_packages_the_flag_is_refused_in_one_sentence(tmp_path: Path) -> None:
    # FastAPI itself brings a part of OpenTelemetry.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry.sdk'] = None\n")
    with Stack(tmp_path, {"PYTHONPATH": str(tmp_path)}) as stack:
        frontend = stack.frontend("--otlp-endpoint", "http://127.0.0.1:4318")
        assert frontend.wait() == 2, frontend.text()
        assert "pip install '.[otel]'" in frontend.text().splitlines()[-1]
        assert "Traceback" not in frontend.text()
