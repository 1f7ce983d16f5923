"""The frontend's Prometheus metrics."""

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from operator import add
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from baton.errors import HandoffStalled
from baton.messages import WorkerInfo, WorkerStats
from baton.telemetry import num_lost_lines, unauthenticated
from frontend.record import STAGES, Record, Records, Stage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.35, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKEN_MS = [round(bound_s * 1000) for bound_s in _TOKEN_S]
_MOVED_BYTES = (0, *(4**power for power in range(7, 18)))  # 16 KiB to 16 GiB
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")
_MAX_VALUES = 100
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Samples = dict[str, dict[str, float]]
"""Values by metric and sample, e.g. `{"requests": {'baton_requests_total{status="200"}': 1.0}}`."""


class Scrape(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks another process of this frontend for its Samples."""


Others = Callable[[Any], Awaitable[Sequence[Any]]]
"""Sends a Scrape, a Look or a Find to the frontend's other processes; returns what those have that answer."""


Refusal = Literal["queue_full", "too_late", "waited", "workers"]
"""Why there is no place: the queue is full; the request would wait too long, or has; workers are full."""


class _Kind(NamedTuple):
    """Of one metric: Prometheus' type, the text, the labels, the bounds of a histogram. `merge` joins the
    values of processes, each of which sees the whole fleet."""

    type: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    merge: Callable[[float, float], float] = add


_counter, _gauge, _histogram = (partial(_Kind, type_) for type_ in ("counter", "gauge", "histogram"))
_ROUTE, _KEY = ("route",), ("key",)
_BY_MODEL, _PLACE, _WORKER = ("route", "model"), ("model", "kind"), ("worker", "role")
_TABLE = {
    "requests": _counter("Requests by HTTP status; 499: the client disconnected.", (*_BY_MODEL, "status")),
    "request_duration_seconds": _histogram("Time from arrival to the response's end.", _BY_MODEL, _LATENCY_S),
    "time_to_first_token_seconds": _histogram("Time from arrival to the first token.", _BY_MODEL, _LATENCY_S),
    "inter_token_latency_seconds": _histogram("Time between two chunks of an answer.", _BY_MODEL, _TOKEN_S),
    "stage_seconds": _histogram("Time in a stage, by how it ended.", ("stage", "outcome"), _LATENCY_S),
    "stage_requests": _gauge("Requests that are in each stage now.", ("stage",)),
    "attempts": _counter("Attempts on workers by how they ended: ok, or an error code.", ("reason",)),
    "handoffs_stalled": _counter("Attempts that ended because no KV arrived from prefill."),
    "prompt_tokens": _counter("Tokens of prompts.", ("model",)),
    "completion_tokens": _counter("Generated tokens.", ("model",)),
    "running_requests": _gauge("Requests in progress.", _ROUTE),
    "disconnects": _counter("Requests whose client disconnected.", _ROUTE),
    "harmony_repairs": _counter("Repairs of malformed Harmony output.", ("kind",)),
    "ignored_fields": _counter("Fields of request bodies that were ignored.", ("field",)),
    "request_moved_kv_bytes": _histogram("KV that moved for one request, if known.", (), _MOVED_BYTES),
    "queued_requests": _gauge("Requests that wait in the queue for a place."),
    "queue_callers": _gauge("Callers in the queue: API keys with their users, or addresses."),
    "queue_largest_caller_requests": _gauge("Queued requests of the caller that has most.", merge=max),
    "key_queued_requests": _gauge("Requests in the queue by the API key's name.", _KEY),
    "key_running_requests": _gauge("Requests in progress by the API key's name.", _KEY),
    "key_requests": _counter("Requests by the API key's name and HTTP status.", ("key", "status")),
    "refused_requests": _counter("Requests refused with status 429.", ("reason",)),
    "places": _gauge("Places: prefill (before the first token), running, and queue.", _PLACE),
    "taken_places": _gauge("Places that are taken.", _PLACE),
    "prefills": _counter("Prompts by the role that computed them, and why.", ("where", "reason")),
    "prefix_routes": _counter("Choices by prefix: its own worker, or another.", ("role", "place")),
    "workers": _gauge("Registered workers; live ones get requests.", ("role", "state"), merge=max),
    "workers_lost": _counter("How often each worker was lost.", ("worker",), merge=max),
    "cut_pairs": _gauge("Pairs of workers between which no KV moves now.", merge=max),
    "pairs_cut": _counter("How often a pair of workers was cut.", merge=max),
    "unauthenticated_messages": _counter("Messages from unknown senders, ignored."),
    "lost_log_lines": _counter("Log lines that were lost because stderr was not read."),
}
_OF_WORKERS = {
    "num_running": ("worker_running_requests", _gauge("Requests that the worker runs.", _WORKER)),
    "num_waiting": ("worker_waiting_requests", _gauge("Requests in the worker's own queue.", _WORKER)),
    "kv_blocks": ("kv_blocks", _gauge("Blocks of the worker's KV cache.", _WORKER)),
    "kv_used_blocks": ("kv_used_blocks", _gauge("Blocks of KV in use.", _WORKER)),
    "kv_pinned_blocks": ("kv_pinned_blocks", _gauge("Blocks of KV that decode has to fetch.", _WORKER)),
    "kv_cached_blocks": ("kv_cached_blocks", _gauge("Free blocks whose KV can be reused.", _WORKER)),
    "num_prompt_tokens": ("worker_prompt_tokens", _counter("Prompt tokens computed.", _WORKER)),
    "num_cached_tokens": ("worker_cached_tokens", _counter("Prompt tokens found in the cache.", _WORKER)),
    "num_generated_tokens": ("worker_generated_tokens", _counter("Tokens generated.", _WORKER)),
    "num_handoffs": ("handoffs", _counter("Handoffs sent by prefill, taken by decode.", _WORKER)),
    "num_handoffs_expired": ("handoffs_expired", _counter("Handoffs that decode did not take.", _WORKER)),
    "kv_moved_bytes": ("kv_moved_bytes", _counter("KV moved between workers.", _WORKER)),
    "kv_move_s": ("kv_move_seconds", _counter("Time that moves of KV took.", _WORKER)),
    "num_accepted_guesses": ("worker_accepted_guesses", _counter("Guessed tokens that were right.", _WORKER)),
    "num_rejected_guesses": ("worker_rejected_guesses", _counter("Guessed tokens that were wrong.", _WORKER)),
    "num_strange_messages": ("worker_unauthenticated_messages", _counter("Of unknown senders.", _WORKER)),
}
"""The metric of each field of WorkerStats."""
KINDS = _TABLE | dict(_OF_WORKERS.values())
_OLD = {field: name for field, (name, kind) in _OF_WORKERS.items() if field != name or kind.type == "counter"}
for _field in ("kv_move_s", "num_accepted_guesses", "num_rejected_guesses"):
    del _OLD[_field]  # promtool refuses the unit of the first; the others are new
_OLD |= {"frontend_strange_messages": "unauthenticated_messages", "frontend_lost_log_lines": "lost_log_lines"}
"""Gauges of 0.2 by name, and the metric that replaces each; they end with 0.4."""
_AT_FIRST: list[tuple[str, ...]] = [
    *((name,) for name, kind in _TABLE.items() if not kind.labels),
    *(each for stage in STAGES for each in (("stage_seconds", stage, "ok"), ("stage_requests", stage))),
    *(("refused_requests", reason) for reason in get_args(Refusal)),
    *(("key_queued_requests", "none"), ("key_running_requests", "none")),
    *(("attempts", "ok"), ("ignored_fields", "other")),
]
"""These series begin with 0, so that the first that they count is an increase."""
_NOW = {"running_requests", "stage_requests", "key_queued_requests", "key_running_requests"}


class Series:
    """The value of one metric with one set of label values. Of a histogram it is the sum; `counts` are those
    of the values up to each of its `bounds`, and of longer ones. Used by the event loop's thread only."""

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        self.bounds = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.value = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.value += value


class Metrics:
    """One app's metrics. Labels are bounded: routes, served models, statuses, names of keys and workers.
    `at_scrape` are called before the values are read."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, ...], Series] = {}
        self._seen: dict[str, set[str]] = defaultdict(set)
        self.records = Records()
        self.begin = self.records.begin
        self._gaps = defaultdict[tuple[str, str], defaultdict[int, int]](lambda: defaultdict(int))
        self.first_ms, self.gap_ms = Counter[int](), Counter[int]()
        """By whole milliseconds, times to first tokens and between two chunks, until somebody takes them."""
        self.at_scrape: list[Callable[[], object]] = []
        self.readers: list[Callable[[Record], object]] = []
        """Called with each record that has ended."""
        self.of = cache(self._of)
        """The series of that metric with these label values, see `_TABLE`."""
        for series in _AT_FIRST:
            self.of(*series)

    def expect(self, model: str) -> None:
        """Show zeros for this model, so that its first requests are an increase."""
        for route in _GENERATING:
            known = {"route": route, "model": model, "status": "200"}
            for name, kind in _TABLE.items():
                if kind.labels and known.keys() >= set(kind.labels):
                    self.of(name, *map(known.__getitem__, kind.labels))

    def _of(self, name: str, *labels: str) -> Series:
        series = self._series[name, *labels] = Series(_TABLE[name].bounds)
        return series

    def bounded(self, name: str, value: str) -> str:
        """The value as a label's value; `other` after _MAX_VALUES different ones of this name."""
        seen = self._seen[name]
        if value not in seen and len(seen) >= _MAX_VALUES:
            return "other"
        seen.add(value)
        return value

    def end(self, record: Record) -> None:
        """Keep and count a request that has ended."""
        self.records.end(record)
        self._count(record)
        for read in self.readers:
            read(record)

    def _count(self, record: Record) -> None:
        of, route, model, status = self.of, record.route, record.model, str(record.status)
        of("requests", route, model, status).value += 1
        of("key_requests", self._key(record.caller), status).value += 1
        of("request_duration_seconds", route, model).observe(record.duration_s or 0.0)
        if record.first_token_s is not None:
            of("time_to_first_token_seconds", route, model).observe(record.first_token_s)
        if record.disconnected:
            of("disconnects", route).value += 1
        if record.num_prompt_tokens:
            of("prompt_tokens", model).value += record.num_prompt_tokens
            of("completion_tokens", model).value += record.num_completion_tokens
        for kind, count in record.repairs.items():
            of("harmony_repairs", kind).value += count
        outcome = "ok"
        if record.status >= 400:
            outcome = record.code or ("disconnected" if record.disconnected else status)
        self._count_stages(record.stages, outcome)
        for leg in record.legs:
            if leg.num_moved_bytes is not None:
                of("request_moved_kv_bytes").observe(leg.num_moved_bytes)
            for attempt in leg.attempts:
                reason = attempt.outcome or outcome
                self._count_stages(attempt.stages, reason)
                if attempt.has_workers:
                    of("attempts", reason).value += 1
                    of("handoffs_stalled").value += reason == HandoffStalled.code

    def _count_stages(self, stages: Mapping[Stage, float], outcome: str) -> None:
        for stage, lasted_s in stages.items():
            self.of("stage_seconds", stage, outcome).observe(lasted_s)

    def _key(self, caller: str) -> str:
        return self.bounded("key", caller) if caller else "none"

    def gaps(self, record: Record) -> defaultdict[int, int]:
        """Counts of times between two chunks by whole milliseconds. The caller counts them up: `observe`
        costs too much for each token."""
        return self._gaps[record.route, record.model]

    def note_gaps(self) -> None:
        """Add what callers of `gaps` have counted."""
        for labels, counts in self._gaps.items():
            series = self.of("inter_token_latency_seconds", *labels)
            for gap_ms, count in counts.items():
                series.counts[bisect_right(_TOKEN_MS, gap_ms)] += count
                series.value += (gap_ms + 0.5) * count / 1000
            self.gap_ms.update(counts)
            counts.clear()

    def count_ignored(self, fields: Iterable[str]) -> None:
        """Count ignored fields by name; after _MAX_VALUES names, or for malformed ones, as `other`."""
        for field in fields:
            name = self.bounded("ignored_fields", field) if _FIELD.fullmatch(field) else "other"
            self.of("ignored_fields", name).value += 1

    def _note_running(self) -> None:
        """Count the requests in progress by route, stage and key; a choice is in a stage of its own."""
        for (name, *_), series in self._series.items():
            if name in _NOW:
                series.value = 0.0
        for record in self.records.running():
            key = self._key(record.caller)
            self.of("running_requests", record.route).value += 1
            self.of("key_running_requests", key).value += 1
            for stage in record.running:
                self.of("stage_requests", stage).value += 1
                if stage == "queue":
                    self.of("key_queued_requests", key).value += 1

    def total(self, name: str) -> float:
        """The sum of the metric's values over all labels; of gauges, at the last scrape."""
        return sum(series.value for key, series in self._series.items() if key[0] == name)

    def samples(self) -> Samples:
        """The current values."""
        for note in self.at_scrape:
            note()
        self.of("unauthenticated_messages").value = unauthenticated.num_messages
        self.of("lost_log_lines").value = num_lost_lines()
        self.note_gaps()
        self._note_running()
        found: Samples = {name: {} for name in KINDS}
        for (name, *values), series in self._series.items():
            found[name] |= _samples_of(name, dict(zip(_TABLE[name].labels, values, strict=True)), series)
        return found

    def page(
        self,
        workers: Iterable[tuple[WorkerInfo, WorkerStats]],
        others: Sequence[Samples] = (),
        *,
        with_keys: bool = True,
    ) -> bytes:
        """The text of /metrics: the metrics of all processes of this frontend, and those of the workers.
        Names of API keys only if `with_keys`."""
        found = self.samples()
        for name, values in (each for samples in others for each in samples.items()):
            mine, merge = found[name], KINDS[name].merge
            mine |= {key: merge(mine[key], value) if key in mine else value for key, value in values.items()}
        for info, stats in workers:
            labels = {"worker": info.label, "role": info.role.value}
            for field, (name, _) in _OF_WORKERS.items():
                found[name][sample_name(_full(name), labels)] = getattr(stats, field)
        lines: list[str] = []
        for name, kind in KINDS.items():
            if with_keys or "key" not in kind.labels:
                lines += _family(_full(name), kind.type, kind.help, found[name])
        for old, new in _OLD.items():
            renamed = {each.replace(_full(new), old, 1): value for each, value in found[new].items()}
            lines += _family(old, "gauge", f"Ends with 0.4: see baton_{_full(new)}.", renamed)
        return "".join(f"{line}\n" for line in lines).encode()


def _full(name: str) -> str:
    return f"{name}_total" if KINDS[name].type == "counter" else name


def _samples_of(name: str, labels: dict[str, str], series: Series) -> Iterator[tuple[str, float]]:
    if not KINDS[name].bounds:
        yield sample_name(_full(name), labels), series.value
        return
    for bound, total in zip(series.bounds, accumulate(series.counts), strict=True):
        end = "+Inf" if bound == math.inf else str(float(bound))
        yield sample_name(f"{name}_bucket", labels | {"le": end}), total
    yield sample_name(f"{name}_count", labels), total
    yield sample_name(f"{name}_sum", labels), series.value


def sample_name(name: str, labels: Mapping[str, str]) -> str:
    """A sample as Prometheus' text format names it: `baton_<name>{label="value",...}`."""
    pairs = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sorted(labels.items()))
    return f"baton_{name}{{{pairs}}}" if pairs else f"baton_{name}"


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP baton_{name} {text}"
    yield f"# TYPE baton_{name} {kind}"
    yield from (f"{sample} {float(value)}" for sample, value in samples.items())
