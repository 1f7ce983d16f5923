"""Which stage of a request is out of line, on which worker, and what would have helped."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from frontend.record import Attempt, Record, Stage

_LEAST_S = 0.25
"""Less is no reason to call a request slow."""
_LEAST_SHARE = 0.2
"""Of the request's duration."""
_TIMES = 3.0
"""A stage is out of line if it took this many times the p95 of recent ones."""
_ENOUGH = 20
"""Recent requests, before their p95 says anything."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The guilty stage. `excess_s`: how much longer it took than usual; `worker` is empty if it is none's."""

    stage: Stage
    excess_s: float
    worker: str
    cause: str
    help: str


class Usual(NamedTuple):
    """The p95 of recent requests: by stage in seconds, of prefill by computed token, of the longest gap."""

    stages: Mapping[Stage, float] = {}
    prefill_per_token_s: float = math.inf
    gap_s: float = 0.0
    is_known: bool = False

    @classmethod
    def of(cls, recent: Iterable[Record]) -> "Usual":
        """Of requests that ended well; empty if they are too few."""
        well = [record for record in recent if 0 < record.status < 400]
        if len(well) < _ENOUGH:
            return cls()
        spent = [record.spent() for record in well]
        names = {stage for stages in spent for stage in stages}
        per_token = [
            stages["prefill"] / max(1, record.num_prompt_tokens - record.num_cached_tokens)
            for stages, record in zip(spent, well, strict=True)
            if "prefill" in stages
        ]
        gaps = [leg.gap_s for record in well for leg in record.legs]
        by_stage = {name: _p95([stages.get(name, 0.0) for stages in spent]) for name in names}
        return cls(by_stage, _p95(per_token) if per_token else math.inf, _p95(gaps), is_known=True)

    def most_s(self, stage: Stage, num_computed: int) -> float:
        """What the stage may take, for a prompt of which so many tokens were computed."""
        if _RULES[stage].is_wait or stage == "transit":
            return 0.0
        if not self.is_known:
            return math.inf
        return _TIMES * (
            self.prefill_per_token_s * num_computed if stage == "prefill" else self.stages.get(stage, 0.0)
        )


def _p95(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0


class _Rule(NamedTuple):
    """Of a stage: what it means that it is out of line, and what helps. `{worker}` is the one it ran on."""

    cause: str
    help: str
    is_wait: bool = False
    """Usually none: also a wait that all requests have is out of line."""


_RULES: Mapping[Stage, _Rule] = {
    "read": _Rule("the client sent its body slowly", "a faster client, or a smaller body"),
    "render": _Rule(
        "the prompt was long to render and tokenize", "a shorter prompt, or more --num-processes"
    ),
    "queue": _Rule("all workers were busy", "another decode worker, or larger batches", is_wait=True),
    "prefill_wait": _Rule("{worker} was busy with other prompts", "another prefill worker", is_wait=True),
    "prefill": _Rule("{worker} computed the prompt slowly", "another prefill worker"),
    "decode_wait": _Rule("{worker} was full", "another decode worker, or larger batches", is_wait=True),
    "kv_move": _Rule("the KV moved slowly to {worker}", "a look at the link between the two hosts"),
    "transit": _Rule("{worker} stood still, or the link to it", "a look at its host: CPU, swap, network"),
    "send": _Rule("the client did not read its stream", "a faster client"),
}
_FROZEN = "this frontend stood still"
_GAP = _Rule("{worker} sent nothing for a while", "a look at its host and its log")
_LOST = {
    "worker_lost": "{worker} was lost",
    "handoff_stalled": "no KV arrived from {worker}",
    "handoff_failed": "the KV of {worker} was gone",
    "overloaded": "{worker} was full",
}


def verdict(record: Record, usual: Usual) -> Verdict | None:
    """What made the request slow, or made an attempt fail; None if no stage is out of line."""
    duration_s = sum(record.spent().values())
    least_s = max(_LEAST_S, _LEAST_SHARE * duration_s)
    found = [each for each in _candidates(record, usual) if each.excess_s >= least_s]
    worst = max(found, key=lambda each: each.excess_s, default=None)
    if worst is not None and record.delay_s > worst.excess_s / 2:
        return Verdict(
            stage=worst.stage,
            excess_s=worst.excess_s,
            worker="",
            cause=_FROZEN,
            help="more CPU for the frontend",
        )
    return worst


def _candidates(record: Record, usual: Usual) -> Iterator[Verdict]:
    num_computed = max(1, record.num_prompt_tokens - record.num_cached_tokens)
    for stages in (record.stages, *(leg.stages for leg in record.legs)):
        for stage, lasted_s in stages.items():
            if stage != "stream":
                yield _judged(stage, _RULES[stage], lasted_s - usual.most_s(stage, num_computed), "")
    for leg in record.legs:
        for attempt in leg.attempts:
            if attempt.outcome:
                yield _failed(attempt)
                continue
            for stage, lasted_s in attempt.stages.items():
                yield _judged(
                    stage, _RULES[stage], lasted_s - usual.most_s(stage, num_computed), attempt.worker(stage)
                )
        if leg.attempts:
            yield _judged("stream", _GAP, leg.gap_s - _TIMES * usual.gap_s, leg.attempts[-1].decode)


def _failed(attempt: Attempt) -> Verdict:
    stage: Stage = max(attempt.stages, key=lambda each: attempt.stages[each], default="transit")
    source = "kv_move" if attempt.outcome.startswith("handoff") else stage
    rule = _Rule(
        _LOST.get(attempt.outcome, f"{{worker}} failed ({attempt.outcome})"), "a second worker of its role"
    )
    return _judged(
        stage,
        rule,
        sum(attempt.stages.values()),
        attempt.prefill if source == "kv_move" else attempt.worker(stage),
    )


def _judged(stage: Stage, rule: _Rule, excess_s: float, worker: str) -> Verdict:
    cause = rule.cause.format(worker=worker or "a worker")
    return Verdict(stage=stage, excess_s=excess_s, worker=worker, cause=cause, help=rule.help)
