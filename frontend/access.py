"""The access log, one line for each request that has ended, and a line about the load while there is any."""

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from baton.pace import Pulse
from baton.telemetry import Line
from frontend.metrics import Metrics
from frontend.record import Attempt, Leg, Record
from frontend.snapshot import Snapshots

log = logging.getLogger(__name__)

AccessMode = Literal["all", "slow", "off"]

SLOW_S = 1.0
BUSY_EVERY_S = 10
FIELDS: Sequence[Mapping[str, str]] = (
    {each: each for each in ("request_id", "route", "model", "status", "code")}
    | {each: each for each in ("duration_s", "delay_s", "starved_s", "cpu_wait_s")}
    | {"key": "caller", "ttft_s": "first_token_s", "prompt_tokens": "num_prompt_tokens"}
    | {"cached_tokens": "num_cached_tokens", "completion_tokens": "num_completion_tokens"},
    {"gap_s": "gap_s", "gap_at": "gap_at"},
    {"prefill": "prefill", "decode": "decode", "late": "late"},
)
"""What the line calls attributes of the record, of the choice with the longest gap, of its last attempt."""


def log_requests(metrics: Metrics, mode: AccessMode) -> None:
    """Log each request that ends from now on: all, or those that took longer than SLOW_S or failed."""

    def note(record: Record) -> None:
        if mode == "all" or record.status >= 400 or (record.duration_s or 0.0) > SLOW_S:
            log.log(logging.WARNING if record.status >= 500 else logging.INFO, line_of(record))

    if mode != "off":
        metrics.readers.append(note)


def line_of(record: Record) -> Line:
    """The line of a request that has ended; of several choices, gap and workers are those of one. It has no
    text of the client's but the id."""
    leg = max(record.legs, key=lambda each: each.gap_s, default=Leg(attempts=[Attempt()]))
    last = next((each for each in reversed(leg.attempts) if each.has_workers), leg.attempts[-1])
    failed = (each for leg in record.legs for each in leg.attempts if each.outcome)
    found = {
        name: getattr(part, attribute)
        for part, names in zip((record, leg, last), FIELDS, strict=True)
        for name, attribute in names.items()
    } | {
        "client": "" if record.caller else record.address,
        "attempts": 0,
        "failures": "; ".join(map(_failure, failed)),
        **{f"{stage}_s": lasted_s for stage, lasted_s in record.spent().items()},
    }
    fields = {name: (round(v, 3) if isinstance(v, float) else v) or None for name, v in found.items()}
    fields |= {"duration_s": round(record.duration_s or 0.0, 4), "attempts": len(record.attempts)}
    return Line("request", **fields)


def _failure(attempt: Attempt) -> str:
    """Its code, workers, stage and seconds, as `baton why --log` reads it."""
    workers = "->".join(filter(None, (attempt.prefill, attempt.decode)))
    return f"{attempt.outcome} {workers} {attempt.ended_in} {attempt.waited_s:.3f}"


def log_load(metrics: Metrics, snapshots: Snapshots) -> None:
    """Log throughput and load every BUSY_EVERY_S from now on, while there are requests."""

    def note() -> None:
        counts = snapshots.lately(BUSY_EVERY_S)
        running = metrics.records.running()
        if counts["ended"] or running:
            fields = {
                "tokens_per_s": counts["tokens"] / BUSY_EVERY_S,
                "requests_per_s": counts["ended"] / BUSY_EVERY_S,
                "running": sum(set(record.running) != {"queue"} for record in running),
                "queued": int(metrics.total("queued_requests")),
                "refused": counts["refused"],
            }
            log.info(Line("load", **fields))

    Pulse(BUSY_EVERY_S, note)
