"""The frontend's Prometheus metrics, and the per-request tally that feeds them."""

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from baton.messages import WorkerInfo, WorkerStats
from baton.telemetry import num_lost_lines, unauthenticated

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_MOVED_BYTES = (0, *(4**power for power in range(7, 18)))  # 16 KiB to 16 GiB
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_MAX_FIELDS = 100


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
        "histogram", "A request's mean time between tokens.", _BY_MODEL, _TOKEN_S
    ),
    "prompt_tokens": _Kind("counter", "Prompt tokens.", _MODEL),
    "completion_tokens": _Kind("counter", "Generated tokens.", _MODEL),
    "history_tokens": _Kind("counter", "Prompt tokens of earlier answers, by source.", ("source",)),
    "running_requests": _Kind("gauge", "Requests in progress.", _ROUTE),
    "disconnects": _Kind("counter", "Requests whose client disconnected.", _ROUTE),
    "harmony_repairs": _Kind("counter", "Repairs of malformed Harmony output.", ("kind",)),
    "ignored_fields": _Kind("counter", "Ignored fields in request bodies.", ("field",)),
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
    `bounds`. Used by the event loop's thread only: the library's own take a lock and ten calls for each.
    """

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

    def add_to(self, metric: Metric, labels: dict[str, str]) -> None:
        """Add the samples that Prometheus has for it."""
        if metric.type != "histogram":
            metric.add_sample(metric.name + "_total" * (metric.type == "counter"), labels, self.value)
            return
        ends = [*map(floatToGoString, self.bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        for end, total in zip(ends, totals, strict=True):
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": end}, total)
        metric.add_sample(f"{metric.name}_count", labels, totals[-1])
        metric.add_sample(f"{metric.name}_sum", labels, self.value)


class Metrics:
    """One app's metrics, in its own registry. Labels are bounded: routes, served models, statuses."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._series: dict[tuple[str, ...], Series] = {}
        self._seen_fields: set[str] = set()
        self.of = cache(self._of)
        """The series of that metric with these label values, see `_TABLE`."""
        for name, kind in _TABLE.items():
            if not kind.labels:
                self.of(name)

    def _of(self, name: str, *labels: str) -> Series:
        series = self._series[name, *labels] = Series(_TABLE[name].bounds)
        return series

    def collect(self) -> Iterable[Metric]:
        """The metrics with their samples, for the registry."""
        self.of("frontend_strange_messages").value = unauthenticated.num_messages
        self.of("frontend_lost_log_lines").value = num_lost_lines()
        for name, kind in _TABLE.items():
            metric = Metric(f"baton_{name}", kind.help, kind.type)
            for (of, *labels), series in self._series.items():
                if of == name:
                    series.add_to(metric, dict(zip(kind.labels, labels, strict=True)))
            yield metric

    def begin(self, route: str) -> "Tally":
        """Record a request's arrival."""
        self.of("running_requests", route).inc()
        return Tally(route=route, began_s=time.perf_counter())

    def end(self, tally: "Tally") -> None:
        """Record a request's end and its tally."""
        labels = (tally.route, tally.model)
        now_s = time.perf_counter()
        self.of("running_requests", tally.route).inc(-1)
        self.of("requests", *labels, str(tally.status)).inc()
        self.of("request_duration_seconds", *labels).observe(now_s - tally.began_s)
        if tally.disconnected:
            self.of("disconnects", tally.route).inc()
        if tally.first_token_s is not None:
            self.of("time_to_first_token_seconds", *labels).observe(tally.first_token_s - tally.began_s)
            num_gaps = tally.num_completion_tokens / tally.num_choices - 1  # choices run concurrently
            if num_gaps > 0:
                mean_s = (now_s - tally.first_token_s) / num_gaps
                self.of("inter_token_latency_seconds", *labels).observe(mean_s)
        if tally.num_prompt_tokens:
            self.of("prompt_tokens", tally.model).inc(tally.num_prompt_tokens)
            self.of("completion_tokens", tally.model).inc(tally.num_completion_tokens)
        for source, count in tally.history.items():
            if count:
                self.of("history_tokens", source).inc(count)
        for kind, count in tally.repairs.items():
            self.of("harmony_repairs", kind).inc(count)

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields by name; after `_MAX_FIELDS` names, or for malformed ones, as `other`."""
        seen = self._seen_fields
        for field in fields:
            if field not in seen and len(seen) < _MAX_FIELDS and _FIELD.fullmatch(field):
                seen.add(field)
            self.of("ignored_fields", field if field in seen else "other").inc()

    def samples(self) -> list["Sampled"]:
        """The current values."""
        return [
            Sampled(m.name, m.documentation, m.type, [(s.name, s.labels, s.value) for s in m.samples])
            for m in self.registry.collect()
        ]

    def page(
        self,
        workers: Iterable[tuple[WorkerInfo, WorkerStats]],
        others: Sequence[Sequence["Sampled"]] = (),
    ) -> bytes:
        """The text of /metrics: the frontend's metrics, added to those of its other processes, and a gauge
        `baton_<field>` per WorkerStats field."""
        scrape = CollectorRegistry(auto_describe=False)
        scrape.register(_WorkerGauges(list(workers)))
        if not others:
            return generate_latest(self.registry) + generate_latest(scrape)
        added = CollectorRegistry(auto_describe=False)
        added.register(_Added([self.samples(), *others]))
        return generate_latest(added) + generate_latest(scrape)


class Tally(msgspec.Struct, kw_only=True):
    """The figures of one request. Times are `time.perf_counter` values; `status` is the HTTP status, or that
    of the error that ended a stream."""

    route: str
    began_s: float
    model: str = ""
    status: int = 200
    first_token_s: float | None = None
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    repairs: Mapping[str, int] = {}
    history: Mapping[str, int] = {}
    disconnected: bool = False


class Sampled(msgspec.Struct, frozen=True):
    """A metric's values in one process: (name, labels, value)."""

    name: str
    help: str
    kind: str
    values: list[tuple[str, dict[str, str], float]]


class _Added:
    """The metrics of several processes as one."""

    def __init__(self, processes: Sequence[Sequence[Sampled]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        """Each metric with its sums."""
        found: dict[str, Metric] = {}
        values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        for sampled in chain.from_iterable(self._processes):
            found.setdefault(sampled.name, Metric(sampled.name, sampled.help, sampled.kind))
            for name, labels, value in sampled.values:
                key = sampled.name, name, tuple(labels.items())
                values[key] = values.get(key, 0.0) + value
        for (metric, name, pairs), value in values.items():
            found[metric].add_sample(name, dict(pairs), value)
        return found.values()


class _WorkerGauges:
    """The workers' statistics for one scrape."""

    def __init__(self, workers: list[tuple[WorkerInfo, WorkerStats]]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One family per field of WorkerStats."""
        for field in WorkerStats.__struct_fields__:
            family = GaugeMetricFamily(f"baton_{field}", f"WorkerStats.{field}", labels=("worker", "role"))
            for info, stats in self._workers:
                family.add_metric([info.worker_id, info.role.value], getattr(stats, field))
            yield family
