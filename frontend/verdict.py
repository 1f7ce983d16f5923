"""`GET /requests`: which stage of a request is out of line, on which worker, and what would have helped."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from statistics import median
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from frontend.record import HOST, LINK, STAGES, Attempt, Leg, Record, Records, Rule, Stage

_LEAST_S, _LEAST_BUSY_S = 0.25, 0.5
"""Less beyond the usual is no reason to call a request slow; the second is the limit on a busy machine."""
_TIMES = 3.0
"""A stage is out of line if it took this many times the p95 of recent ones. A machine is as busy as its
frontend's event loop stands still; this many times the p95 of that is no reason either."""
_SPREAD = 5.0
"""A p95 is at most this many times the p80: else a few requests of an incident would hide the next ones."""
_ENOUGH = 8
"""Recent requests on one worker, before their p95 says anything."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The slow stage and the cause. `excess_s`: beyond what is usual; `worker` is empty if it is none's;
    `crowd`: the API key whose requests the workers were busy with."""

    stage: Stage
    excess_s: float
    worker: str = ""
    cause: str
    help: str
    crowd: str = ""


_LOG = "a look at the log of {worker}"
_IF_FULL = "another worker if {worker} is full, else "
_RULES: Mapping[str, Rule] = {
    **{str(stage): rule for stage, rule in STAGES.items()},
    "no_workers": Rule("no decode worker was live", "another decode worker", "wait"),
    "broker_unavailable": Rule("NATS could not be reached", "a look at NATS", "wait"),
    "answer": Rule("{worker} did not answer", _IF_FULL + HOST, by="computed", per_token_s=5e-4),
    "gap": Rule("{worker} sent nothing for a while", HOST),
    "delay": Rule("this frontend stood still", "more CPU for the frontend, or --num-processes"),
    "still": Rule("{worker} stood still", HOST),
    "busy": Rule("the host of {worker} was busy", "more CPU, or less other work on that host"),
    "worker_lost": Rule("{worker} was lost", "a look at its log and host; a second worker of its role"),
    "handoff_stalled": Rule("no KV came from {prefill} to {decode}", LINK),
    "handoff_failed": Rule("the KV of {prefill} was gone", _LOG),
    "overloaded": STAGES["decode_wait"],
    "not_ready": Rule("{worker} was not ready", _LOG),
    "engine_failure": Rule("the engine of {worker} failed", _LOG),
}
"""By stage; `gap`: the longest time between two tokens; `answer`: a worker had not answered when the request
ended; `delay`, `still`: an event loop stood still; `busy`: for want of a CPU. And by an attempt's code."""
_WAITS = {name for name, rule in _RULES.items() if rule.group == "wait"}
_OTHER = Rule("{worker} failed ({code})", _LOG)


class _Part(NamedTuple):
    """How long a rule's matter took, in which attempt; `has_failed` is out of line however short."""

    rule: str
    stage: Stage
    lasted_s: float
    attempt: Attempt = Attempt()
    has_failed: bool = False

    def verdict(self, excess_s: float, record: Record) -> Verdict:
        """That this is the slow stage, or that its host was busy: the frontend's, or the workers'."""
        attempt, stage, rule = self.attempt, self.stage, self.rule
        worker = attempt.prefill if rule.startswith("handoff") else attempt.worker(stage)
        names = {"worker": worker or "a worker", "prefill": attempt.prefill, "decode": attempt.decode}
        waited_s = record.cpu_wait_s + attempt.starved_s
        stood_s = max(part.delay_s - part.starved_s for part in (record, attempt))
        if waited_s > self.lasted_s / 2 > stood_s and not self.has_failed:
            of_workers = attempt.has_workers and record.cpu_wait_s < attempt.starved_s
            names["worker"] = worker or attempt.decode or attempt.prefill if of_workers else "this frontend"
            rule, worker = "busy", ""
        elif rule in {"gap", "prefill"} and attempt.delay_s > self.lasted_s / 2:
            rule = "still"
        words = _RULES.get(rule, _OTHER)[:2]
        cause, helps = (text.format_map({**names, "code": rule}) for text in words)
        return Verdict(stage=stage, excess_s=excess_s, worker=worker, cause=cause, help=helps)


def _size(rule: Rule, record: Record) -> int:
    """The tokens by which it grows."""
    if rule.by == "computed":
        return max(1, record.num_prompt_tokens - record.num_cached_tokens)
    return max(1, record.num_completion_tokens // record.num_choices) if rule.by else 0


class _Typical(NamedTuple):
    """How long a stage usually takes on one worker: seconds per token, and beside these median and p95."""

    per_token_s: float = 0.0
    median_s: float = 0.0
    p95_s: float = 0.0

    @classmethod
    def of(cls, samples: list[tuple[int, float]], rule: Rule) -> "_Typical":
        """Of (number of tokens, seconds)."""
        longest = sorted(samples)[len(samples) // 2 :]
        rate_s = min(median(lasted_s / max(1, num) for num, lasted_s in longest), rule.per_token_s)
        rests = sorted(max(0.0, lasted_s - rate_s * num) for num, lasted_s in samples)
        median_s, p80_s, p95_s = (rests[int(share * len(rests))] for share in (0.5, 0.8, 0.95))
        return cls(rate_s, median_s, min(p95_s, _SPREAD * p80_s))

    def most_s(self, num_tokens: int) -> float:
        """More is out of line."""
        return _TIMES * (self.per_token_s * num_tokens + self.p95_s)


def _parts(record: Record) -> Iterator[_Part]:
    """What may be out of line; the frontend's own delay first."""
    spent = record.spent()
    longest: Stage = max(spent, key=lambda stage: spent[stage], default="read")
    yield _Part("delay", longest, record.delay_s)
    for stage, lasted_s in record.stages.items():
        if stage != "stream":  # of a background response, which has a record of its own
            yield _Part(stage, stage, lasted_s)
    for leg in record.legs:
        yield from _parts_of(leg)
    if record.code in _WAITS and not record.attempts:
        rule = "queue" if record.code == "overloaded" else record.code
        yield _Part(rule, "queue", spent.get("queue", 0.0), has_failed=True)


def _parts_of(leg: Leg) -> Iterator[_Part]:
    waits, is_lost = [], False
    for attempt in leg.attempts:
        # A prompt that decode computes in place of a lost worker is no stage of its own.
        left_out = {"stream", "prefill"} if is_lost and not attempt.prefill else {"stream"}
        is_lost |= attempt.outcome.startswith(("worker_lost", "handoff"))
        for stage, lasted_s in attempt.stages.items():
            rule = (attempt.absent or stage) if stage == "queue" else stage
            if stage == attempt.ended_in:
                rule = "answer"
            if rule in _WAITS and (stage == "queue" or not attempt.outcome):
                waits.append(_Part(rule, stage, lasted_s, attempt))
            elif stage == "send" or not (attempt.outcome or stage in left_out):
                yield _Part(rule, stage, lasted_s, attempt)
        if attempt.outcome:
            yield _failed(leg, attempt)
    if waits:  # together: the same pool was full
        longest = max(waits, key=lambda part: part.lasted_s)
        yield longest._replace(lasted_s=sum(part.lasted_s for part in waits))
    yield from _streamed(leg)


def _streamed(leg: Leg) -> Iterator[_Part]:
    """The longest gap between two tokens, unless it came with a failure, and the rest of the stream."""
    failed = (each for each in leg.attempts if each.outcome and each.num_tokens >= leg.gap_at)
    owner = next(failed, leg.attempts[-1])
    if not leg.gap_at or (owner.outcome and owner.num_tokens == leg.gap_at):
        return
    before_s = sum(owner.stages.get(stage, 0.0) for stage in ("decode_wait", "kv_move", "transit"))
    is_start = leg.gap_at == 1 and before_s > leg.gap_s / 2  # prefill sent the first token itself
    yield _Part("gap", "stream", 0.0 if is_start else leg.gap_s, owner)
    if len(leg.attempts) == 1:
        yield _Part("stream", "stream", owner.stages.get("stream", 0.0) - leg.gap_s, owner)


def _failed(leg: Leg, attempt: Attempt) -> _Part:
    """One that failed in the stream took until there were tokens again."""
    stage, lasted_s = attempt.ended_in or "stream", attempt.waited_s
    if attempt.outcome.startswith("handoff"):
        stage = "kv_move"
    elif stage == "stream":
        after = leg.attempts[leg.attempts.index(attempt) + 1 :][:1]
        again_s = sum(each.waited_s for each in after)
        lasted_s = leg.gap_s if attempt.num_tokens == leg.gap_at else again_s
    workers = Attempt() if attempt.outcome == "broker_unavailable" else attempt  # it is no worker's fault
    return _Part(attempt.outcome, stage, lasted_s, workers, has_failed=True)


class Usual:
    """What recent requests took, each stage on the worker that is best at it, and whose they were."""

    def __init__(self, recent: Iterable[Record], since_s: float = 0.0) -> None:
        """Compare with those that ended well and were not tried again. All that ended after `since_s` are
        known."""
        self._since_s = since_s
        found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
        self._spans = []
        for record in recent:
            if record.first_token_s is not None:  # else it did no more than wait, as far as is known
                before = _WAITS | {"read", "render"}
                waited_s = sum(lasted_s for stage, lasted_s in record.spent().items() if stage in before)
                ended_s = record.at_s + (record.duration_s or 0)
                self._spans.append((record.caller, len(record.legs), record.at_s + waited_s, ended_s))
            if 0 < record.status < 400 and len(record.attempts) == len(record.legs) > 0:
                for part in _parts(record):
                    size = _size(_RULES[part.rule], record)
                    found[part.rule][part.attempt.worker(part.stage)].append((size, part.lasted_s))
        self._typical: dict[str, _Typical] = {}
        for rule in found.keys() - _WAITS:
            made = [_Typical.of(each, _RULES[rule]) for each in found[rule].values() if len(each) >= _ENOUGH]
            if made:
                self._typical[rule] = min(made, key=lambda each: each.most_s(100))
        self._delay_s = self._typical.get("delay", _Typical()).p95_s

    def excess_s(self, part: _Part, record: Record) -> float | None:
        """How much longer than usual it took; None if it is not out of line. When the frontend stood still
        nothing else is the cause."""
        if part.has_failed:
            return part.lasted_s
        if part.rule in _WAITS:
            return part.lasted_s if part.lasted_s >= _LEAST_S else None
        rule, typical = _RULES[part.rule], self._typical.get(part.rule)
        num, usual_s = _size(rule, record), 0.0
        most_s = rule.most_s + min(rule.per_token_s, 1.0) * num
        if typical is not None:
            usual_s, most_s = typical.per_token_s * num + typical.median_s, typical.most_s(num)
        mine_s = part.lasted_s - (0.0 if part.rule == "delay" else record.delay_s)
        busy_s = _TIMES * max(self._delay_s, record.cpu_wait_s)
        least_s = min(max(_LEAST_S, busy_s), _LEAST_BUSY_S)
        return part.lasted_s - usual_s if mine_s > most_s and mine_s - usual_s >= least_s else None

    def crowd(self, record: Record, lasted_s: float) -> str:
        """The API key that had most of the workers' time while this one waited, and in the second before, if
        it is another's."""
        shares: dict[str, float] = defaultdict(float)
        for name, num, first_s, last_s in self._spans:
            begun_s = max(first_s, record.at_s - 1.0)
            shares[name] += num * max(0.0, min(last_s, record.at_s + lasted_s) - begun_s)
        name = max(shares, key=lambda each: shares[each], default=record.caller)
        is_known = name != record.caller and record.at_s > self._since_s
        return name if is_known and shares[name] > sum(shares.values()) / 2 else ""


def verdict(record: Record, usual: Usual) -> Verdict | None:
    """What made the request slow, or made an attempt fail; None if no stage is out of line."""
    found_s = ((usual.excess_s(part, record), part) for part in _parts(record))
    late = [(excess_s, part) for excess_s, part in found_s if excess_s is not None]
    if not late:
        return None
    worst_s, worst = max(late, key=lambda each: (each[0], each[1].rule == "delay"))
    first_s, first = late[0]
    if first.rule == "delay" and first_s >= worst_s / 2:
        return replace(first.verdict(first_s, record), stage=worst.stage)
    found = worst.verdict(worst_s, record)
    is_full = worst.rule in _WAITS & STAGES.keys()
    return replace(found, crowd=usual.crowd(record, worst_s)) if is_full else found


MAX_FOUND = 100
_NUM_RECENT = 300
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_FOUND)]


class Find(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Which requests: those with this id, the slowest, the failed, or those that run; `limit` at most."""

    by: Literal["id", "slowest", "failed", "running"]
    request_id: str = ""
    limit: _Limit = MAX_FOUND


class Found(msgspec.Struct, frozen=True, array_like=True):
    """Of one process: what was looked for, and recent requests to compare them with."""

    matches: list[Record]
    recent: list[Record]


class Explained(msgspec.Struct, kw_only=True):
    """A request, and what made it slow or fail; null if no stage is out of line."""

    record: Record
    verdict: Verdict | None


class RequestsBody(msgspec.Struct, kw_only=True):
    """The response of `GET /requests`."""

    requests: list[Explained]


def query_of(fields: Sequence[tuple[str, str]]) -> Find:
    """The query's fields as a Find. Raises InvalidRequest."""
    by, value = fields[0] if len(fields) == 1 else ("", "")
    if by == "id":
        return Find("id", value)
    if (by, value) == ("running", "1"):
        return Find("running")
    try:
        limit = msgspec.convert(value, _Limit, strict=False)
        return Find(msgspec.convert(by, Literal["slowest", "failed"]), limit=limit)
    except msgspec.ValidationError:
        usage = f"Give one of `id=ID`, `slowest=N`, `failed=N` (N from 1 to {MAX_FOUND}) and `running=1`."
        raise InvalidRequest(usage, param=by[:40] or None) from None


def find(records: Records, query: Find) -> Found:
    """What this process has."""
    match query.by:
        case "id":
            matches = records.find(query.request_id, query.limit)
        case "running":
            matches = records.running()
        case "slowest":
            matches = records.slowest(query.limit)
        case "failed":
            matches = records.newest(query.limit, failed=True)
    running = [each.so_far() for each in records.running()[:_NUM_RECENT]]
    found = [each.so_far() if each.duration_s is None else each for each in matches[: query.limit]]
    return Found(found, [*records.newest(_NUM_RECENT), *running])


def explain(query: Find, found: Sequence[Found]) -> RequestsBody:
    """What all processes have found, explained; the slowest first, or the newest, or the longest running."""
    recent = chain.from_iterable(each.recent for each in found)
    usual = Usual(recent, max(_since_s(each.recent) for each in found))
    records = chain.from_iterable(each.matches for each in found)
    order = attrgetter("duration_s" if query.by == "slowest" else "at_s")
    first = sorted(records, key=order, reverse=query.by != "running")[: query.limit]
    return RequestsBody(requests=[Explained(record=each, verdict=verdict(each, usual)) for each in first])


def _since_s(recent: Sequence[Record]) -> float:
    """All requests that have ended since then are in it."""
    ends_s = [each.at_s + (each.duration_s or 0.0) for each in recent if each.now is None]
    return min(ends_s) if len(ends_s) >= _NUM_RECENT else 0.0
