"""The frontend's Prometheus metrics, and the per-request tally that feeds them."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from baton.messages import Role, Usage, WorkerInfo, WorkerStats
from baton.telemetry import num_lost_lines, unauthenticated

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_MOVED_BYTES = (0, *(4**power for power in range(7, 18)))  # 16 KiB to 16 GiB
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_MAX_FIELDS = 100


Refusal = Literal["queue_full", "too_late", "waited", "workers"]
"""Why there is no place: the queue is full; the request would wait too long, or has; workers are full."""


class Metrics:
    """One app's metrics, in its own registry. Labels are bounded: routes, served models, statuses."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        latency = partial(Histogram, registry=registry, buckets=_LATENCY_S)
        route, model, by_model = ("route",), ("model",), ("route", "model")
        self._requests = counter(
            "baton_requests", "Requests by HTTP status; 499: client disconnected.", (*by_model, "status")
        )
        self._duration = latency(
            "baton_request_duration_seconds", "Time from a request's arrival to its response's end.", by_model
        )
        self._first_token = latency(
            "baton_time_to_first_token_seconds", "Time from a request's arrival to its first token.", by_model
        )
        self._token = partial(latency, buckets=_TOKEN_S)(
            "baton_inter_token_latency_seconds", "A request's mean time between tokens.", by_model
        )
        self.routing = RoutingMetrics(registry)
        self._prompt_tokens = counter("baton_prompt_tokens", "Prompt tokens.", model)
        self._completion_tokens = counter("baton_completion_tokens", "Generated tokens.", model)
        self._history_tokens = counter(
            "baton_history_tokens", "Prompt tokens of earlier answers, by source.", ("source",)
        )
        self._running = gauge("baton_running_requests", "Requests in progress.", route)
        self._disconnects = counter("baton_disconnects", "Requests whose client disconnected.", route)
        self._repairs = counter("baton_harmony_repairs", "Repairs of malformed Harmony output.", ("kind",))
        self._ignored = counter("baton_ignored_fields", "Ignored fields in request bodies.", ("field",))
        strange = gauge("baton_frontend_strange_messages", "Messages of strangers; ignored.")
        strange.set_function(lambda: unauthenticated.num_messages)
        lost = gauge("baton_frontend_lost_log_lines", "Log lines that nobody read; lost.")
        lost.set_function(num_lost_lines)
        self._seen_fields: set[str] = set()
        self._child = cache(_child)  # one dictionary lookup instead of the library's lock and checks

    def begin(self, route: str) -> "Tally":
        """Record a request's arrival."""
        self._child(self._running, route).inc()
        return Tally(route=route, began_s=time.perf_counter())

    def end(self, tally: "Tally") -> None:
        """Record a request's end and its tally."""
        labels = (tally.route, tally.model)
        now_s = time.perf_counter()
        self._child(self._running, tally.route).dec()
        self._child(self._requests, *labels, str(tally.status)).inc()
        self._child(self._duration, *labels).observe(now_s - tally.began_s)
        if tally.disconnected:
            self._child(self._disconnects, tally.route).inc()
        if tally.first_token_s is not None:
            self._child(self._first_token, *labels).observe(tally.first_token_s - tally.began_s)
            if tally.tokens_per_choice > 1:
                self._child(self._token, *labels).observe(
                    (now_s - tally.first_token_s) / (tally.tokens_per_choice - 1)
                )
        if tally.num_prompt_tokens:
            self._child(self._prompt_tokens, tally.model).inc(tally.num_prompt_tokens)
            self._child(self._completion_tokens, tally.model).inc(tally.num_completion_tokens)
        for source, count in tally.history.items():
            if count:
                self._child(self._history_tokens, source).inc(count)
        for kind, count in tally.repairs.items():
            self._child(self._repairs, kind).inc(count)

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields by name; after `_MAX_FIELDS` names, or for malformed ones, as `other`."""
        num_others = 0
        for field in fields:
            known = field in self._seen_fields
            if not known and len(self._seen_fields) < _MAX_FIELDS and _FIELD.fullmatch(field):
                self._seen_fields.add(field)
                known = True
            if known:
                self._child(self._ignored, field).inc()
            num_others += not known
        if num_others:
            self._child(self._ignored, "other").inc(num_others)

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


def _child(metric: Any, *labels: str) -> Any:
    """The part of a metric with these labels."""
    return metric.labels(*labels)


class RoutingMetrics:
    """The Generator's part of /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.prefill_s = histogram(
            "baton_prefill_seconds",
            "Time from sending a prefill request to its handoff, queueing included.",
            buckets=_LATENCY_S,
        )
        self.handoff_s = histogram(
            "baton_handoff_seconds",
            "Time from a handoff to the first token: decode queue, KV transfer, first step.",
            buckets=_LATENCY_S,
        )
        self._moved_bytes = histogram(
            "baton_request_moved_kv_bytes",
            "KV that moved to decode for one request, where the engine reports it.",
            buckets=_MOVED_BYTES,
        )
        self.queue_s = histogram(
            "baton_queue_seconds",
            "Time that requests waited in the frontend for a worker to have room.",
            buckets=_LATENCY_S,
        )
        self.queued = Gauge(
            "baton_queued_requests", "Requests that wait for a worker to have room.", registry=registry
        )
        self._refused = counter("baton_refused_requests", "Requests refused with a 429.", ("reason",))
        self._prefills = counter("baton_prefills", "Prompts by where and why there.", ("where", "reason"))
        self._routes = counter(
            "baton_prefix_routes",
            "Choices by prefix: the conversation's own worker or another.",
            ("role", "place"),
        )

    def count_prefill(self, where: Literal["prefill", "decode"], reason: str) -> None:
        """Count an attempt's prompt by the role of the worker that computes it."""
        self._prefills.labels(where, reason).inc()

    def count_refused(self, reason: Refusal) -> None:
        """Count a 429."""
        self._refused.labels(reason).inc()

    def count_route(self, role: Role, place: str) -> None:
        """Count a choice by prefix, see `frontend.routing.router.Place`."""
        self._routes.labels(role.value, place).inc()

    def note_usage(self, usage: Usage) -> None:
        """Record what the workers told about a request, once."""
        if usage.num_moved_bytes is not None:
            self._moved_bytes.observe(usage.num_moved_bytes)


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

    @property
    def tokens_per_choice(self) -> float:
        """Mean tokens per choice, for inter-token latency: choices run concurrently."""
        return self.num_completion_tokens / self.num_choices


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
        """Each metric with its sums; the time of creation is the earliest."""
        found: dict[str, Metric] = {}
        values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
        for sampled in chain.from_iterable(self._processes):
            found.setdefault(sampled.name, Metric(sampled.name, sampled.help, sampled.kind))
            for name, labels, value in sampled.values:
                key = sampled.name, name, tuple(labels.items())
                known = values.get(key)
                add = min if name.endswith("_created") else float.__add__
                values[key] = value if known is None else add(known, value)
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
