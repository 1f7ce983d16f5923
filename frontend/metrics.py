"""The frontend's Prometheus metrics, and the tally of one request that feeds them once it has ended."""

import re
import time
from collections.abc import Iterable, Mapping
from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from baton.messages import WorkerInfo, WorkerStats

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_MAX_FIELDS = 100


class Metrics:
    """One app's metrics, in a registry of their own. Labels are bounded: routes, served models, statuses."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        latency = partial(Histogram, registry=registry, buckets=_LATENCY_S)
        route, model, by_model = ("route",), ("model",), ("route", "model")
        self._requests = counter(
            "baton_requests", "Answered; 499 is a client that left.", (*by_model, "status")
        )
        self._duration = latency(
            "baton_request_duration_seconds", "From a request's arrival to its answer's end.", by_model
        )
        self._first_token = latency(
            "baton_time_to_first_token_seconds", "From a request's arrival to its first token.", by_model
        )
        self._token = Histogram(
            "baton_inter_token_latency_seconds",
            "Mean time between a request's tokens, one value a request.",
            by_model,
            registry=registry,
            buckets=_TOKEN_S,
        )
        self.prefill_s = latency(
            "baton_prefill_seconds",
            "From asking a prefill worker to its handoff: its queue and the prompt.",
        )
        self.handoff_s = latency(
            "baton_handoff_seconds",
            "From a handoff to the first token: decode's queue, KV pull and a step.",
        )
        self._prompt_tokens = counter("baton_prompt_tokens", "Tokens of the prompts.", model)
        self._completion_tokens = counter("baton_completion_tokens", "Tokens of the answers.", model)
        self._history_tokens = counter("baton_history_tokens", "Tokens of earlier answers.", ("source",))
        self._running = gauge("baton_running_requests", "Requests being answered.", route)
        self._disconnects = counter("baton_disconnects", "Clients that left before the end.", route)
        self._repairs = counter("baton_harmony_repairs", "Malformed Harmony that was understood.", ("kind",))
        self._ignored = counter("baton_ignored_fields", "Fields of bodies that nobody knows.", ("field",))
        self._seen_fields: set[str] = set()

    def begin(self, route: str) -> "Tally":
        """A request has arrived."""
        self._running.labels(route).inc()
        return Tally(route=route, began_s=time.perf_counter())

    def end(self, tally: "Tally") -> None:
        """A request has ended; everything that is known of it is counted."""
        labels = (tally.route, tally.model)
        now_s = time.perf_counter()
        self._running.labels(tally.route).dec()
        self._requests.labels(*labels, str(tally.status)).inc()
        self._duration.labels(*labels).observe(now_s - tally.began_s)
        if tally.disconnected:
            self._disconnects.labels(tally.route).inc()
        if tally.first_token_s is not None:
            self._first_token.labels(*labels).observe(tally.first_token_s - tally.began_s)
            if tally.tokens_per_choice > 1:
                self._token.labels(*labels).observe(
                    (now_s - tally.first_token_s) / (tally.tokens_per_choice - 1)
                )
        if tally.num_prompt_tokens:
            self._prompt_tokens.labels(tally.model).inc(tally.num_prompt_tokens)
            self._completion_tokens.labels(tally.model).inc(tally.num_completion_tokens)
        for source, count in tally.history.items():
            self._history_tokens.labels(source).inc(count)
        for kind, count in tally.repairs.items():
            self._repairs.labels(kind).inc(count)

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count unknown fields by name: the first hundred names that look like one; the others as `other`."""
        for field in fields:
            known = field in self._seen_fields
            if not known and len(self._seen_fields) < _MAX_FIELDS and _FIELD.fullmatch(field):
                self._seen_fields.add(field)
                known = True
            self._ignored.labels(field if known else "other").inc()

    def page(self, workers: Iterable[tuple[WorkerInfo, WorkerStats]]) -> bytes:
        """The text of /metrics: the frontend's own, and a gauge `baton_<field>` for each worker's figures."""
        scrape = CollectorRegistry(auto_describe=False)
        scrape.register(_WorkerGauges(list(workers)))
        return generate_latest(self.registry) + generate_latest(scrape)


class Tally(msgspec.Struct, kw_only=True):
    """What one request came to. Times are of `time.perf_counter`; `status` is the HTTP
    status, or what it would have been had the stream not begun."""

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
        """Choices run side by side, so that the time between tokens is one choice's."""
        return self.num_completion_tokens / self.num_choices


class _WorkerGauges:
    """Every worker's figures, as they were asked for this scrape."""

    def __init__(self, workers: list[tuple[WorkerInfo, WorkerStats]]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One family for each field of WorkerStats."""
        for field in WorkerStats.__struct_fields__:
            family = GaugeMetricFamily(f"baton_{field}", f"WorkerStats.{field}", labels=("worker", "role"))
            for info, stats in self._workers:
                family.add_metric([info.worker_id, info.role.value], getattr(stats, field))
            yield family
