"""Traces: W3C's context of each request, and its spans, which a thread makes and sends once it has ended.

Names and attributes follow OpenTelemetry's conventions for generative AI.
"""

import atexit
import logging
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from baton.flags import version, without_secrets
from frontend.metrics import Metrics
from frontend.record import STAGES, Leg, Record, Trace

log = logging.getLogger(__name__)

MAX_WAITING = 2048
"""Requests; the spans of more are lost, and counted."""
FLUSH_S = 3.0
"""How long the end of the process waits for the receiver."""
_EVERY_S = 1.0
_BATCH = 16  # requests; while their spans are encoded, the event loop waits for some milliseconds
_PATH = "/v1/traces"
_TRACEPARENT = re.compile(
    rb"(?!ff|00.{53}.)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_TRACESTATE = re.compile(rb"[\t -~]{0,512}")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "background": "chat",
    "/v1/completions": "text_completion",
}

Attributes = dict[str, str | int | float]


def sampler(environ: Mapping[str, str]) -> tuple[bool, float]:
    """Whether the client's decision counts, and which share of the other requests is traced."""
    name = (environ.get("OTEL_TRACES_SAMPLER") or "parentbased_always_on").lower()
    kind = name.removeprefix("parentbased_")
    ratio = environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    with suppress(KeyError, ValueError):
        share = float({"always_on": "1", "always_off": "0", "traceidratio": ratio}[kind])
        if 0 <= share <= 1:
            return kind != name, share
    log.warning("OTEL_TRACES_SAMPLER=%s with its argument is unknown: all requests are traced", name)
    return True, 1.0


class Traces:
    """Requests whose spans wait for `send`, which returns why it failed, or nothing. `lost` counts those that
    were not sent."""

    def __init__(
        self, send: Callable[[Sequence[Record]], str], follows_client: bool = True, share: float = 1.0
    ) -> None:
        self.lost: dict[Literal["queue_full", "not_sent"], int] = {"queue_full": 0, "not_sent": 0}
        self._send = send
        self._follows_client = follows_client
        self._bound = round(share * (1 << 64))
        self._waiting: deque[Record] = deque()
        self._closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def begin(self, headers: Mapping[bytes, bytes], lines: Sequence[tuple[bytes, bytes]]) -> Trace:
        """The span of a request with these headers, with repeated ones in `lines`; an invalid `traceparent`,
        or more than one, is ignored."""
        given, state = headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")
        if len(lines) != len(headers):
            given, state = (
                b",".join(value for name, value in lines if name == each)
                for each in (b"traceparent", b"tracestate")
            )
        new_ids = f"{random.getrandbits(192):048x}"
        if not _TRACEPARENT.fullmatch(given):
            return Trace(new_ids[:32], new_ids[32:], is_sampled=self._is_sampled(new_ids))
        text = given.decode()
        trace_id = text[3:35]
        is_sampled = text[54] in "13579bdf" if self._follows_client else self._is_sampled(trace_id)
        kept = state.decode() if state and _TRACESTATE.fullmatch(state) else ""
        return Trace(trace_id, new_ids[32:], text[36:52], kept, is_sampled)

    def _is_sampled(self, trace_id: str) -> bool:
        """By the id, as all processes of a trace decide."""
        return int(trace_id[16:32], 16) < self._bound

    def report_to(self, metrics: Metrics) -> None:
        """Take the requests that end, and report those that are lost; send the rest when the process ends."""
        metrics.readers.append(self.add)
        metrics.at_scrape.append(partial(self._note_lost, metrics))
        atexit.register(self.close)

    def _note_lost(self, metrics: Metrics) -> None:
        for reason, num in self.lost.items():
            metrics.of("lost_traces", reason).value = num

    def add(self, record: Record) -> None:
        """A request has ended. Never waits."""
        if record.trace is None or not record.trace.is_sampled:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(record)
        else:
            self.lost["queue_full"] += 1

    def close(self) -> None:
        """Send what waits, for FLUSH_S at most."""
        self._closing.set()
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            log.warning("traces lost at the end num_waiting=%d", len(self._waiting))

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(_EVERY_S)
            while num := min(_BATCH, len(self._waiting)):
                self._send_now([self._waiting.popleft() for _ in range(num)])

    def _send_now(self, records: Sequence[Record]) -> None:
        reason = self._send(records)
        if reason:
            self.lost["not_sent"] += len(records)
        if bool(reason) != self._is_failing:
            self._is_failing = bool(reason)
            if reason:
                log.warning("traces are lost; the receiver must accept OTLP over HTTP: %s", reason)
            else:
                log.info("traces are sent again num_lost=%d", self.lost["not_sent"])


class Sender(logging.Handler):
    """Sends spans to an OTLP/HTTP endpoint; if that is empty, to the one of OpenTelemetry's variables."""

    def __init__(self, endpoint: str, address: str, port: int) -> None:
        """`address` and `port` are the frontend's."""
        super().__init__()
        self._server: Attributes = {"server.address": address, "server.port": port}
        self._exporter = OTLPSpanExporter(
            endpoint.rstrip("/").removesuffix(_PATH) + _PATH if endpoint else None
        )
        own = Resource.create({"service.name": "baton", "service.version": version().split()[1]})
        self._resource = own.merge(OTELResourceDetector().detect())
        self._reason = ""
        library = logging.getLogger("opentelemetry")  # it returns no reason, but logs one for each try
        library.handlers, library.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what the library says."""
        self._reason = without_secrets(record.getMessage())[:300]

    def __call__(self, records: Sequence[Record]) -> str:
        """Send the spans of these requests; returns why that failed, or nothing."""
        spans: list[ReadableSpan] = []
        for record in records:
            spans += spans_of(record, self._resource, self._server)
            time.sleep(0)  # lets the event loop run
        is_sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        return "" if is_sent else self._reason or "unknown reason"


def spans_of(record: Record, resource: Resource, server: Attributes) -> list[ReadableSpan]:
    """One of the request, and below it one of each attempt and stage, whose times are consecutive."""
    assert record.trace is not None, "only such requests are sent"
    made = _Spans(record.trace, record.at_s, resource)
    made.stages(record.stages, ("read", "render"))
    began_s = ended_s = made.time_s
    for number, leg in enumerate(record.legs):
        made.time_s = began_s
        made.leg(leg, number)
        ended_s = max(ended_s, made.time_s)
    made.time_s = ended_s
    made.stages(record.stages, ("send",))
    made.request(record, server)
    return made.spans


class _Spans:
    """Collects the spans of a request; the next one begins at `time_s` after its arrival."""

    def __init__(self, trace: Trace, at_s: float, resource: Resource) -> None:
        self.spans: list[ReadableSpan] = []
        self.time_s = 0.0
        self._at_s = at_s
        state = TraceState.from_header([trace.state]) if trace.state else None
        trace_id = int(trace.trace_id, 16)
        self._context = partial(
            SpanContext, trace_id, is_remote=False, trace_flags=TraceFlags(1), trace_state=state
        )
        self._request = self._context(int(trace.span_id, 16))
        self._parent = self._context(int(trace.parent_id, 16)) if trace.parent_id else None
        scope = InstrumentationScope("baton")
        self._make = partial(ReadableSpan, resource=resource, instrumentation_scope=scope)

    def leg(self, leg: Leg, number: int) -> None:
        """The attempts of a choice. Between them were the queue and the stream that a lost worker ended, of
        which the record has the sums."""
        left_s = dict(leg.stages)
        for i, attempt in enumerate(leg.attempts, 1):
            between_s = max(0.0, attempt.began_s - self.time_s)
            queued_s = between_s if i == 1 else min(between_s, left_s.get("queue", 0.0))
            between = {"stream": between_s - queued_s, "queue": queued_s}
            self.stages(between, between)
            left_s = {stage: lasted_s - between.get(stage, 0.0) for stage, lasted_s in left_s.items()}
            context, began_s = self._context(_new_id()), self.time_s
            for stage in STAGES:
                self.stages(attempt.stages, (stage,), context, **{"baton.worker": attempt.worker(stage)})
            attributes: Attributes = {
                "baton.attempt": i,
                "baton.choice": number,
                "baton.worker.prefill": attempt.prefill,
                "baton.worker.decode": attempt.decode,
            }
            self._add("attempt", began_s, self._request, attributes, attempt.outcome, context=context)
        self.stages(left_s, ("stream", "queue", "send"))

    def stages(
        self,
        stages: Mapping[Any, float],
        names: Iterable[str],
        parent: SpanContext | None = None,
        **attributes: str,
    ) -> None:
        """These stages, one after the other, without those that took no time."""
        for name in names:
            if (lasted_s := stages.get(name, 0.0)) > 0:
                began_s, self.time_s = self.time_s, self.time_s + lasted_s
                self._add(name, began_s, parent or self._request, {**attributes})

    def request(self, record: Record, server: Attributes) -> None:
        """The request itself."""
        name, attributes = record.route, dict(server)
        if operation := _OPERATIONS.get(record.route):
            name = f"{operation} {record.model}".rstrip()
            attributes |= {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "baton",
                "gen_ai.request.model": record.model,
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
                "gen_ai.usage.output_tokens": record.num_completion_tokens,
                "gen_ai.response.time_to_first_chunk": record.first_token_s or 0.0,
                "baton.longest_gap_s": max((leg.gap_s for leg in record.legs), default=0.0),
            }
        attributes |= {
            "http.route": record.route,
            "http.response.status_code": record.status,
            "baton.request_id": record.request_id,
            "baton.caller": record.caller,
        }
        error = (record.code or str(record.status)) if record.status >= 400 else ""
        self.time_s = record.duration_s or 0.0
        status = Status(StatusCode.ERROR if record.status >= 500 else StatusCode.UNSET)
        more = {"context": self._request, "kind": SpanKind.SERVER, "status": status}
        self._add(name, 0.0, self._parent, attributes, error, **more)

    def _add(
        self,
        name: str,
        began_s: float,
        parent: SpanContext | None,
        attributes: Attributes,
        error: str = "",
        **more: Any,
    ) -> None:
        """A span until `time_s`; attributes that are empty or 0 are left out."""
        known = {key: value for key, value in (attributes | {"error.type": error}).items() if value}
        more.setdefault("context", self._context(_new_id()))
        more.setdefault("status", Status(StatusCode.ERROR if error else StatusCode.UNSET))
        span = self._make(
            name,
            parent=parent,
            attributes=known,
            start_time=round((self._at_s + began_s) * 1e9),
            end_time=round((self._at_s + self.time_s) * 1e9),
            **more,
        )
        self.spans.append(span)


def _new_id() -> int:
    return random.getrandbits(64) or 1
