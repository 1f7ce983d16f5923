"""The frontend's Prometheus metrics."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from baton.messages import WorkerInfo, WorkerStats
from baton.telemetry import num_lost_lines, unauthenticated
from frontend.record import Record, Records

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
MOST_GAP_MS = 2500
_MOVED_BYTES = (0, *(4**power for power in range(7, 18)))  # 16 KiB to 16 GiB
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_MAX_FIELDS = 100
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Samples = dict[str, dict[str, float]]
"""Values by metric and sample, e.g. `{"requests": {'baton_requests_total{status="200"}': 1.0}}`."""

Refusal = Literal["queue_full", "too_late", "waited", "workers"]
"""Why there is no place: the queue is full; the request would wait too long, or has; workers are full."""


class _Kind(NamedTuple):
    """Of one metric: Prometheus' type, the text, the labels, and the upper bounds of a histogram."""

    type: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_MODEL, _ROUTE, _BY_MODEL = ("model",), ("route",), ("route", "model")
_TABLE = {
    "requests": _Kind(
        "counter", "Requests by HTTP status; 499: client disconnected.", (*_BY_MODEL, "status")
    ),
    "request_duration_seconds": _Kind(
        "histogram", "Time from a request's arrival to its response's end.", _BY_MODEL, _LATENCY_S
    ),
    "time_to_first_token_seconds": _Kind(
        "histogram", "Time from a request's arrival to its first token.", _BY_MODEL, _LATENCY_S
    ),
    "inter_token_latency_seconds": _Kind(
        "histogram", "Time between two chunks of an answer, as workers sent them.", _BY_MODEL, _TOKEN_S
    ),
    "prompt_tokens": _Kind("counter", "Prompt tokens.", _MODEL),
    "completion_tokens": _Kind("counter", "Generated tokens.", _MODEL),
    "running_requests": _Kind("gauge", "Requests in progress.", _ROUTE),
    "disconnects": _Kind("counter", "Requests whose client disconnected.", _ROUTE),
    "harmony_repairs": _Kind("counter", "Repairs of malformed Harmony output.", ("kind",)),
    "ignored_fields": _Kind("counter", "Ignored fields in request bodies.", ("field",)),
    "stage_seconds": _Kind(
        "histogram", "Time in each stage of a request.", ("stage", "outcome"), _LATENCY_S
    ),
    "attempts": _Kind("counter", "Attempts on workers, by outcome.", ("outcome",)),
    "prefill_seconds": _Kind(
        "histogram", "Time from sending a prefill request to its handoff, queueing included.", (), _LATENCY_S
    ),
    "handoff_seconds": _Kind(
        "histogram",
        "Time from a handoff to the first token: decode queue, KV transfer, first step.", (), _LATENCY_S
    ),
    "request_moved_kv_bytes": _Kind(
        "histogram",
        "KV that moved to decode for one request, where the engine reports it.", (), _MOVED_BYTES
    ),
    "queue_seconds": _Kind(
        "histogram", "Time that requests waited in the frontend for a worker to have room.", (), _LATENCY_S
    ),
    "queued_requests": _Kind("gauge", "Requests that wait for a worker to have room."),
    "refused_requests": _Kind("counter", "Requests refused with a 429.", ("reason",)),
    "prefills": _Kind("counter", "Prompts by where and why there.", ("where", "reason")),
    "prefix_routes": _Kind(
        "counter", "Choices by prefix: the conversation's own worker or another.", ("role", "place")
    ),
    "frontend_strange_messages": _Kind("gauge", "Unauthenticated messages."),
    "frontend_lost_log_lines": _Kind("gauge", "Log lines that nobody read; lost."),
}  # fmt: skip


class Series:
    """The values of one metric with one set of label values: a number, or the counts of a histogram with
    `bounds`. Used by the event loop's thread only."""

    __slots__ = ("bounds", "counts", "value")

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.value = 0.0
        """Of a histogram: the sum."""

    def inc(self, amount: float = 1) -> None:
        """Add to the value."""
        self.value += amount

    def observe(self, value: float) -> None:
        """Count the value in its bucket."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.value += value


class Metrics:
    """One app's metrics. Labels are bounded: routes, served models, statuses."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, ...], Series] = {}
        self._seen_fields: set[str] = set()
        self.records = Records()
        self.gap_counts: dict[tuple[str, str], list[int]] = {}
        """See `gaps`, by route and model."""
        self.first_ms: Counter[int] = Counter()
        """First tokens since somebody last took this, by whole milliseconds since the arrival."""
        self.of = cache(self._of)
        """The series of that metric with these label values, see `_TABLE`."""
        for name, kind in _TABLE.items():
            if not kind.labels:
                self.of(name)

    def _of(self, name: str, *labels: str) -> Series:
        series = self._series[name, *labels] = Series(_TABLE[name].bounds)
        return series

    def begin(self, route: str, request_id: str = "", caller: str = "") -> Record:
        """Record a request's arrival."""
        self.of("running_requests", route).inc()
        return self.records.begin(request_id, route, caller)

    def end(self, record: Record) -> None:
        """Keep the record of a request that has ended, and count it."""
        duration_s = self.records.end(record)
        labels = (record.route, record.model)
        self.of("running_requests", record.route).inc(-1)
        self.of("requests", *labels, str(record.status)).inc()
        self.of("request_duration_seconds", *labels).observe(duration_s)
        if record.disconnected:
            self.of("disconnects", record.route).inc()
        if record.first_token_s is not None:
            self.of("time_to_first_token_seconds", *labels).observe(record.first_token_s)
        if record.num_prompt_tokens:
            self.of("prompt_tokens", record.model).inc(record.num_prompt_tokens)
            self.of("completion_tokens", record.model).inc(record.num_completion_tokens)
        for kind, count in record.repairs.items():
            self.of("harmony_repairs", kind).inc(count)
        self._note_stages(record)

    def _note_stages(self, record: Record) -> None:
        """Observe each stage; those of an attempt that failed with its error as the outcome."""
        outcome = "ok" if record.status < 400 else record.code or str(record.status)
        parts = [(outcome, record.stages), *((outcome, leg.stages) for leg in record.legs)]
        for leg in record.legs:
            if leg.num_moved_bytes is not None:
                self.of("request_moved_kv_bytes").observe(leg.num_moved_bytes)
        for attempt in (attempt for leg in record.legs for attempt in leg.attempts):
            parts.append((attempt.outcome or "ok", attempt.stages))
            self.of("attempts", attempt.outcome or "ok").inc()
        for outcome, stages in parts:
            for stage, lasted_s in stages.items():
                self.of("stage_seconds", stage, outcome).observe(lasted_s)

    def gaps(self, record: Record) -> list[int]:
        """Counts of times between two chunks by whole milliseconds, the last of all longer ones. The caller
        counts them up: `observe` costs too much for each token."""
        return self.gap_counts.setdefault((record.route, record.model), [0] * (MOST_GAP_MS + 1))

    def _note_gaps(self) -> None:
        for labels, counts in self.gap_counts.items():
            series = Series(_TOKEN_S)
            for gap_ms, count in enumerate(counts):
                series.counts[bisect_left(_TOKEN_S, (gap_ms + 1) / 1000)] += count
                series.value += count * (gap_ms + 0.5) / 1000
            self._series["inter_token_latency_seconds", *labels] = series

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields by name; after `_MAX_FIELDS` names, or for malformed ones, as `other`."""
        seen = self._seen_fields
        for field in fields:
            if field not in seen and len(seen) < _MAX_FIELDS and _FIELD.fullmatch(field):
                seen.add(field)
            self.of("ignored_fields", field if field in seen else "other").inc()

    def total(self, name: str) -> float:
        """The sum of the metric's values over all labels."""
        return sum(series.value for key, series in self._series.items() if key[0] == name)

    def samples(self) -> Samples:
        """The current values."""
        self.of("frontend_strange_messages").value = unauthenticated.num_messages
        self.of("frontend_lost_log_lines").value = num_lost_lines()
        self._note_gaps()
        found: Samples = {name: {} for name in _TABLE}
        for (name, *values), series in self._series.items():
            found[name] |= _samples_of(name, dict(zip(_TABLE[name].labels, values, strict=True)), series)
        return found

    def page(
        self, workers: Iterable[tuple[WorkerInfo, WorkerStats]], others: Sequence[Samples] = ()
    ) -> bytes:
        """The text of /metrics: the frontend's metrics, added to those of its other processes, and a gauge
        `baton_<field>` per WorkerStats field."""
        lines: list[str] = []
        processes = [self.samples(), *others]
        for name, kind in _TABLE.items():
            total: dict[str, float] = {}
            for sample, value in chain.from_iterable(samples[name].items() for samples in processes):
                total[sample] = total.get(sample, 0.0) + value
            lines += _family(name, kind.type, kind.help, total)
        known = list(workers)
        for field in WorkerStats.__struct_fields__:
            gauges = {
                sample_name(field, {"worker": info.label, "role": info.role.value}): getattr(stats, field)
                for info, stats in known
            }
            lines += _family(field, "gauge", f"WorkerStats.{field}", gauges)
        return "".join(f"{line}\n" for line in lines).encode()


def _samples_of(name: str, labels: dict[str, str], series: Series) -> Iterator[tuple[str, float]]:
    kind = _TABLE[name].type
    if kind != "histogram":
        yield sample_name(f"{name}_total" if kind == "counter" else name, labels), series.value
        return
    totals = list(accumulate(series.counts))
    for bound, total in zip((*series.bounds, float("inf")), totals, strict=True):
        end = "+Inf" if bound == float("inf") else str(float(bound))
        yield sample_name(f"{name}_bucket", labels | {"le": end}), total
    yield sample_name(f"{name}_count", labels), totals[-1]
    yield sample_name(f"{name}_sum", labels), series.value


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """A sample as Prometheus' text format names it: `baton_<name>{label="value",...}`."""
    pairs = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sorted(labels.items()))
    return f"baton_{name}{{{pairs}}}" if pairs else f"baton_{name}"


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    name = f"baton_{name}_total" if kind == "counter" else f"baton_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield from (f"{sample} {float(value)}" for sample, value in samples.items())
