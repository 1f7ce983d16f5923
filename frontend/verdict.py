"""Which stage of a request is out of line, on which worker, and what would have helped."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from statistics import median
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from frontend.record import Attempt, Leg, Record, Stage

_LEAST_S = 0.5
"""Less, or less than a rule's `most_s`, is no reason to call a request slow."""
_TIMES = 3.0
"""A stage is out of line if it took this many times the p95 of recent ones."""
_SPREAD = 5.0
"""A p95 is at most this many times the p80: else a few requests of an incident would hide the next ones."""
_ENOUGH = 8
"""Recent requests on one worker, before their p95 says anything."""

Kind = Stage | Literal["gap", "delay"]
"""What is compared: a stage, the longest time between two tokens, how long the frontend stood still."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The guilty stage. `excess_s`: how much longer it took than usual; `worker` is empty if it is none's;
    `crowd`: the API key whose requests the workers were busy with."""

    stage: Stage
    excess_s: float
    worker: str = ""
    cause: str
    help: str
    crowd: str = ""


class _Rule(NamedTuple):
    """What it means that this is out of line, and what helps; the names in it are of workers. Until enough
    requests have ended `most_s` is allowed, and `per_token_s` of the tokens `by` which it grows. `is_wait`:
    nothing is, as a wait that all requests have is out of line too."""

    cause: str
    help: str
    most_s: float = 0.5
    is_wait: bool = False
    by: Literal["", "computed", "generated"] = ""
    per_token_s: float = inf


_MORE_DECODE = "another decode worker, or larger batches"
_HOST = "a look at the host of {worker}: CPU, swap, network"
_LINK = "a look at the network between them"
_LOG = "a look at the log of {worker}"
_RULES: Mapping[Kind, _Rule] = {
    "read": _Rule("the client sent its body slowly", "a faster client, or a smaller body"),
    "render": _Rule("the prompt took long to render and tokenize", "a shorter prompt, or more CPU", 0.3),
    "queue": _Rule("all workers were busy", "another worker, or larger batches", 0.3, is_wait=True),
    "prefill_wait": _Rule(
        "{worker} was busy with other prompts", "another prefill worker", 0.3, is_wait=True
    ),
    "prefill": _Rule(
        "{worker} computed the prompt or a grammar slowly, or stood still",
        _HOST,
        1.0,
        by="computed",
        per_token_s=5e-4,
    ),
    "decode_wait": _Rule("{worker} was full", _MORE_DECODE, 0.3, is_wait=True),
    "kv_move": _Rule(
        "the KV moved slowly from {prefill} to {decode}", _LINK, 0.3, by="computed", per_token_s=1e-4
    ),
    "transit": _Rule("{worker} stood still, or the network to it", _HOST),
    "stream": _Rule("{worker} sent its tokens slowly", _MORE_DECODE, inf, by="generated"),
    "gap": _Rule("{worker} sent nothing for a while", _HOST),
    "send": _Rule("the client did not read what was sent", "a faster client or network"),
    "delay": _Rule("this frontend stood still", "more CPU for the frontend, or --num-processes"),
}
_NO_ANSWER = ("{worker} did not answer", _HOST)
_FAILURES: Mapping[str, tuple[str, str]] = {
    "worker_lost": ("{worker} was lost", "a look at its log and host; a second worker of its role"),
    "handoff_stalled": ("no KV came from {prefill} to {decode}", _LINK),
    "handoff_failed": ("the KV of {prefill} was gone", _LOG),
    "overloaded": ("{worker} was full", _MORE_DECODE),
    "not_ready": ("{worker} was not ready", _LOG),
    "engine_failure": ("the engine of {worker} failed", _LOG),
    "broker_unavailable": ("NATS could not be reached", "a look at NATS"),
    "no_workers": ("no decode worker was live", "another decode worker"),
}
"""By the code of an attempt, or of what a request waited for."""


class Typical(msgspec.Struct, frozen=True, kw_only=True):
    """How long a stage usually takes on one worker: seconds per token, and beside these median and p95."""

    per_token_s: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, samples: list[tuple[int, float]], rule: _Rule) -> "Typical":
        """Of (number of tokens, seconds)."""
        longest = sorted(samples)[len(samples) // 2 :]
        rate_s = median(lasted_s / max(1, num) for num, lasted_s in longest) if rule.by else 0.0
        rate_s = min(rate_s, rule.per_token_s)
        rests = sorted(max(0.0, lasted_s - rate_s * num) for num, lasted_s in samples)
        median_s, p80_s, p95_s = (rests[int(share * len(rests))] for share in (0.5, 0.8, 0.95))
        return cls(per_token_s=rate_s, median_s=median_s, p95_s=min(p95_s, _SPREAD * p80_s))

    def most_s(self, num_tokens: int) -> float:
        """More is out of line."""
        return _TIMES * (self.per_token_s * num_tokens + self.p95_s)


class Usual:
    """What recent requests took, each stage on the worker that is best at it, and whose they were."""

    def __init__(self, typical: Mapping[Kind, Typical], spans: list[tuple[str, float, float]]) -> None:
        self.typical = typical
        self._spans = spans

    @classmethod
    def of(cls, recent: Iterable[Record]) -> "Usual":
        """Stages of those that ended well and were not tried again."""
        found: dict[Kind, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
        spans = []
        for record in recent:
            spans.append((record.caller, record.at_s, record.at_s + (record.duration_s or 0.0)))
            if 0 < record.status < 400 and record.num_attempts == len(record.legs) > 0:
                for kind, worker, lasted_s in _parts(record):
                    found[kind][worker].append((_size(_RULES[kind], record), lasted_s))
        typical = {}
        for kind, workers in found.items():
            made = [Typical.of(each, _RULES[kind]) for each in workers.values() if len(each) >= _ENOUGH]
            if made:
                typical[kind] = min(made, key=lambda each: each.most_s(100))
        return cls(typical, spans)

    def crowd(self, caller: str, began_s: float, ended_s: float) -> str:
        """The API key that had most of the workers' time then, if it is another's."""
        shares: dict[str, float] = defaultdict(float)
        for name, first_s, last_s in self._spans:
            shares[name] += max(0.0, min(last_s, ended_s) - max(first_s, began_s))
        name = max(shares, key=lambda each: shares[each], default=caller)
        return name if name != caller and shares[name] > sum(shares.values()) / 2 else ""


def _size(rule: _Rule, record: Record) -> int:
    if rule.by == "computed":
        return max(1, record.num_prompt_tokens - record.num_cached_tokens)
    return max(1, record.num_completion_tokens // record.num_choices) if rule.by else 0


def _parts(record: Record) -> Iterator[tuple[Kind, str, float]]:
    """What a request that went well took, by worker."""
    yield "delay", "", record.delay_s
    for kind in ("read", "render", "send"):
        yield kind, "", record.stages.get(kind, 0.0)
    for leg in record.legs:
        for attempt in leg.attempts:
            for stage, lasted_s in attempt.stages.items():
                yield stage, attempt.worker(stage), lasted_s
            if attempt.decode and leg.gap_at:  # it sent more than one token
                yield "gap", attempt.decode, leg.gap_s
                yield "stream", attempt.decode, leg.stages.get("stream", 0.0)


def verdict(record: Record, usual: Usual) -> Verdict | None:
    """What made the request slow, or made an attempt fail; None if no stage is out of line. If this frontend
    stood still meanwhile, no worker is blamed for that."""
    judge = _Judge(record, usual)
    worst = max((*judge.found(), *judge.failures()), key=lambda each: each.excess_s, default=None)
    spent = record.spent()
    longest: Stage = max(spent, key=lambda stage: spent[stage], default="read")
    delay = next(judge.compared("delay", worst.stage if worst else longest, record.delay_s), None)
    if delay is not None and (worst is None or delay.excess_s >= worst.excess_s / 2):
        return delay
    if worst is None or not _RULES[worst.stage].is_wait:
        return worst
    return replace(worst, crowd=usual.crowd(record.caller, record.at_s, record.at_s + worst.excess_s))


class _Judge:
    """Looks at each stage of one request."""

    def __init__(self, record: Record, usual: Usual) -> None:
        self._record = record
        self._usual = usual

    def found(self) -> Iterator[Verdict]:
        """What is out of line."""
        record = self._record
        stages: tuple[Stage, ...] = ("read", "render", "send")
        for stage in stages:
            yield from self.compared(stage, stage, record.stages.get(stage, 0.0))
        for leg in record.legs:
            yield from self.compared("send", "send", leg.stages.get("send", 0.0))
            on_workers = [each for attempt in leg.attempts for each in self._attempt(attempt)]
            yield from on_workers
            yield from self._queued(leg, leg.stages.get("queue", 0.0), on_workers)
            yield from self._streamed(leg)

    def compared(
        self, kind: Kind, stage: Stage, lasted_s: float, attempt: Attempt | None = None, worker: str = ""
    ) -> Iterator[Verdict]:
        """A verdict if this took longer than usual."""
        rule = _RULES[kind]
        typical, num = self._usual.typical.get(kind), _size(rule, self._record)
        usual_s, most_s = 0.0, 0.0 if rule.is_wait else rule.most_s + min(rule.per_token_s, 1.0) * num
        if typical is not None and not rule.is_wait:
            usual_s, most_s = typical.per_token_s * num + typical.median_s, typical.most_s(num)
        if lasted_s - usual_s >= min(_LEAST_S, rule.most_s) and lasted_s > most_s:
            yield _verdict(stage, lasted_s - usual_s, rule[:2], attempt, worker)

    def _queued(self, leg: Leg, lasted_s: float, on_workers: list[Verdict]) -> Iterator[Verdict]:
        """Of the wait for a place, together with that in the worker's own queue: the same pool was full."""
        wait = next((each for each in on_workers if each.stage in {"prefill_wait", "decode_wait"}), None)
        for queued in self.compared("queue", "queue", lasted_s):
            if leg.absent:
                yield _verdict("queue", lasted_s, _FAILURES[leg.absent])
            elif wait is None:
                yield queued
            else:
                longer = wait if wait.excess_s > lasted_s else queued
                yield replace(longer, excess_s=lasted_s + wait.excess_s, worker=wait.worker)

    def _attempt(self, attempt: Attempt) -> Iterator[Verdict]:
        """Of the stages of one that answered, or of how long it did not."""
        for stage, lasted_s in attempt.stages.items() if not attempt.outcome else ():
            worker = attempt.worker(stage)
            if stage != attempt.ended_in:
                yield from self.compared(stage, stage, lasted_s, attempt, worker)
            elif any(self.compared("prefill", stage, lasted_s)):
                yield _verdict(stage, lasted_s, _NO_ANSWER, attempt, worker)

    def _streamed(self, leg: Leg) -> Iterator[Verdict]:
        """Of the longest gap between two tokens, unless it came with a failure, or of slow tokens."""
        last = leg.attempts[-1] if leg.attempts else None
        owner = next((each for each in leg.attempts if each.outcome and each.num_tokens >= leg.gap_at), last)
        if owner is None or (owner.outcome and owner.num_tokens == leg.gap_at):
            return
        before_s = sum(owner.stages.get(stage, 0.0) for stage in ("decode_wait", "kv_move", "transit"))
        is_start = leg.gap_at <= 1 and before_s > leg.gap_s / 2  # prefill sent the first token itself
        gaps = [] if is_start else list(self.compared("gap", "stream", leg.gap_s, owner, owner.decode))
        slow = self.compared("stream", "stream", leg.stages.get("stream", 0.0), owner, owner.decode)
        yield from gaps or ([] if len(leg.attempts) > 1 else slow)

    def failures(self) -> Iterator[Verdict]:
        """The attempts that failed, and the error of a request that had none."""
        for leg in self._record.legs:
            yield from (_failed(leg, attempt) for attempt in leg.attempts if attempt.outcome)
        code = self._record.code
        if code in {"overloaded", "no_workers", "broker_unavailable"} and not self._record.num_attempts:
            lasted_s = sum(leg.stages.get("queue", 0.0) for leg in self._record.legs[:1])
            yield _verdict(
                "queue", lasted_s, _RULES["queue"][:2] if code == "overloaded" else _FAILURES[code]
            )


def _failed(leg: Leg, attempt: Attempt) -> Verdict:
    stage, lasted_s = attempt.ended_in or "stream", sum(attempt.stages.values())
    worker = attempt.worker(stage) or attempt.prefill
    if attempt.outcome == "broker_unavailable":
        worker = ""
    elif attempt.outcome.startswith("handoff"):
        stage, worker = "kv_move", attempt.prefill
    if stage == "stream":
        after = leg.attempts[leg.attempts.index(attempt) + 1 :][:1]
        again_s = sum(sum(each.stages.values()) for each in after)
        lasted_s = leg.gap_s if attempt.num_tokens == leg.gap_at else again_s
    words = _FAILURES.get(attempt.outcome, (f"{{worker}} failed ({attempt.outcome})", _LOG))
    return _verdict(stage, lasted_s, words, attempt, worker)


def _verdict(
    stage: Stage,
    excess_s: float,
    words: tuple[str, str],
    attempt: Attempt | None = None,
    worker: str = "",
) -> Verdict:
    prefill, decode = (attempt.prefill, attempt.decode) if attempt else ("", "")
    names = {"worker": worker or "a worker", "prefill": prefill, "decode": decode}
    cause, helps = (text.format_map(names) for text in words)
    return Verdict(stage=stage, excess_s=excess_s, worker=worker, cause=cause, help=helps)
