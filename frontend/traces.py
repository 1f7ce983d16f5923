"""Traces: W3C's context of each request, and its spans, named by OpenTelemetry's conventions for AI."""

import atexit
import logging
import math
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.flags import version, without_secrets
from frontend.record import STAGES, Attempt, Leg, Record, Trace

log = logging.getLogger(__name__)

FLUSH_S = 3.0
"""How long the end of the process waits for the receiver."""
_LOG_EVERY_S = 60.0
_BATCH = 16  # requests; while their spans are encoded, the event loop waits for some milliseconds
_PATH = "/v1/traces"
_W3C = TraceContextTextMapPropagator()
_IDS = RandomIdGenerator()
_SAMPLED = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
_SCOPE = InstrumentationScope("baton")
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "background")
_OPERATIONS = dict.fromkeys(_CHATS, "chat") | {"/v1/completions": "text_completion"}

Attributes = dict[str, str | int | float]


class Traces:
    """Sends the spans of requests to an OTLP/HTTP endpoint; if that is empty, to the one of OpenTelemetry's
    variables. They also choose the requests, the headers and the queue's size. `server` are attributes."""

    def __init__(self, endpoint: str, server: Attributes) -> None:
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [_Rarely(logging.WARNING)], False
        own = Resource.create({"service.name": "baton", "service.version": version().split()[1]})
        provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._sampler = provider.sampler
        url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH if endpoint else None
        exporter = _Exporter(url, provider.resource, server)
        self._processor = BatchSpanProcessor(exporter, max_export_batch_size=_BATCH)
        atexit.register(self.close)

    def begin(self, given: str) -> Trace:
        """The span of a request with this `traceparent`, which is ignored if it is malformed."""
        context = _W3C.extract({"traceparent": given})
        parent = get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else _IDS.generate_trace_id()
        is_sampled = self._sampler.should_sample(context, trace_id, "").decision is Decision.RECORD_AND_SAMPLE
        own = f"00-{trace_id:032x}-{_IDS.generate_span_id():016x}-{is_sampled:02x}"
        return Trace(own, f"{parent.span_id:016x}" if parent.is_valid else "")

    def add(self, record: Record) -> None:
        """A request has ended. Never waits."""
        if record.trace is not None and record.trace.own.endswith("1"):
            self._processor.on_end(_Ended(record))

    def close(self) -> None:
        """Send what waits, for FLUSH_S at most."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            log.warning("the last traces are lost: the receiver does not answer")


class _Rarely(logging.Handler):
    """Logs what OpenTelemetry does, once a minute: it repeats itself for each batch."""

    _next_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOG_EVERY_S
            log.warning("OpenTelemetry: %s", without_secrets(record.getMessage())[:300])


class _Ended(ReadableSpan):
    """A request in the queue; its spans are made by the thread that sends them."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.route, _SAMPLED, resource=Resource.get_empty())
        self.record = record


class _Exporter(OTLPSpanExporter):
    """Sends the spans of requests."""

    def __init__(self, url: str | None, resource: Resource, server: Attributes) -> None:
        super().__init__(url)
        self._resource, self._server = resource, server

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Returns whether the receiver has taken them."""
        made: list[ReadableSpan] = []
        for each in spans:
            assert isinstance(each, _Ended), "`Traces.add` adds no others"
            made += spans_of(each.record, self._resource, self._server)
            time.sleep(0)  # lets the event loop run
        return super().export(made)


def spans_of(record: Record, resource: Resource, server: Attributes) -> list[ReadableSpan]:
    """One of the request, and below it one of each attempt and stage, whose times are consecutive."""
    made = _Spans(record, resource)
    at_s = made.stages(0.0, record, ("read", "render", "queue"))
    ends_s = [made.leg(at_s, leg, number) for number, leg in enumerate(record.legs)]
    made.stages(max(ends_s, default=at_s), record, ("send",))
    made.request(record, server)
    return made.spans


class _Spans:
    """Collects the spans of a request. Their times count from its arrival."""

    def __init__(self, record: Record, resource: Resource) -> None:
        assert record.trace is not None, "only such requests are sent"
        self.spans: list[ReadableSpan] = []
        self._at_s, self._resource = record.at_s, resource
        _, trace_id, span_id, _ = record.trace.own.split("-")
        self._trace_id, parent_id = int(trace_id, 16), record.trace.parent_id
        self._request = self._context(int(span_id, 16))
        self._parent = self._context(int(parent_id, 16), is_remote=True) if parent_id else None

    def _context(self, span_id: int = 0, *, is_remote: bool = False) -> SpanContext:
        """That of a span; it gets an id if it has none."""
        span_id = span_id or _IDS.generate_span_id()
        return SpanContext(self._trace_id, span_id, is_remote, _SAMPLED.trace_flags)

    def leg(self, at_s: float, leg: Leg, number: int) -> float:
        """The attempts of a choice, each after its wait for a place. Returns when they end."""
        for i, attempt in enumerate(leg.attempts, 1):
            began_s = at_s = self.stages(at_s, attempt, ("queue",))
            if attempt.has_workers:
                context, error = self._context(), attempt.outcome
                at_s = self.stages(at_s, attempt, STAGES.keys() - {"queue"}, context)
                attributes: Attributes = {"baton.attempt": i, "baton.choice": number, "error.type": error}
                attributes |= {"baton.worker.prefill": attempt.prefill, "baton.worker.decode": attempt.decode}
                status = StatusCode.ERROR if error else StatusCode.UNSET
                self._add("attempt", began_s, at_s, attributes, context=context, status=Status(status))
        return at_s

    def stages(
        self, at_s: float, part: Record | Attempt, names: Collection[str], parent: SpanContext | None = None
    ) -> float:
        """These stages, one after the other, without those that took no time. Returns when they end."""
        for name in STAGES:
            if name in names and (lasted_s := part.stages.get(name, 0.0)) > 0:
                worker = part.worker(name) if isinstance(part, Attempt) else ""
                began_s, at_s = at_s, at_s + lasted_s
                self._add(name, began_s, at_s, {"baton.worker": worker}, parent=parent or self._request)
        return at_s

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
                "baton.longest_gap_s": record.gap_s,
            }
        attributes |= {
            "http.route": record.route,
            "http.response.status_code": record.status,
            "baton.request_id": record.request_id,
            "baton.caller": record.caller,
            "error.type": (record.code or str(record.status)) if record.status >= 400 else "",
        }
        status = Status(StatusCode.ERROR if record.status >= 500 else StatusCode.UNSET)
        own = {"parent": self._parent, "context": self._request, "kind": SpanKind.SERVER, "status": status}
        self._add(name, 0.0, record.duration_s or 0.0, attributes, **own)

    def _add(self, name: str, begin_s: float, end_s: float, attributes: Attributes, **more: Any) -> None:
        """A span; attributes that are empty or 0 are left out."""
        span = ReadableSpan(
            name,
            resource=self._resource,
            instrumentation_scope=_SCOPE,
            attributes={key: value for key, value in attributes.items() if value},
            start_time=round((self._at_s + begin_s) * 1e9),
            end_time=round((self._at_s + end_s) * 1e9),
            **{"context": self._context(), "parent": self._request} | more,
        )
        self.spans.append(span)
