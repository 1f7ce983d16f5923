"""The access log, one line for each request that has ended, and a line about the load while there is any."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Literal

from baton.telemetry import Line
from frontend.http.services import Services
from frontend.metrics import Metrics
from frontend.record import Attempt, Leg, Record

log = logging.getLogger(__name__)

AccessMode = Literal["all", "slow", "off"]

SLOW_S = 1.0
BUSY_EVERY_S = 10
_LATE_S = 0.1
"""After a longer transit the line has its worker, after a longer delay of this frontend that."""
_SHOWN_S = 0.001
"""A shorter stage is not in the line."""


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
    leg = max(record.legs, key=lambda each: each.gap_s, default=Leg(began_s=0.0))
    last = leg.attempts[-1] if leg.attempts else Attempt(began_s=0.0)
    stages = {f"{stage}_s": round(s, 3) for stage, s in record.spent().items() if s >= _SHOWN_S}
    return Line(
        "request",
        request_id=record.request_id,
        route=record.route,
        model=record.model,
        key=record.caller,
        client="" if record.caller else record.address,
        status=record.status,
        code=record.code,
        duration_s=round(record.duration_s or 0.0, 4),
        ttft_s=None if record.first_token_s is None else round(record.first_token_s, 3),
        attempts=record.num_attempts,
        prefill=last.prefill,
        decode=last.decode,
        gap_s=round(leg.gap_s, 3) or None,
        gap_at=leg.gap_at or None,
        prompt_tokens=record.num_prompt_tokens or None,
        cached_tokens=record.num_cached_tokens if record.num_prompt_tokens else None,
        completion_tokens=record.num_completion_tokens if record.num_prompt_tokens else None,
        failures="; ".join(_failure(each) for leg in record.legs for each in leg.attempts if each.outcome),
        late=last.late if last.stages.get("transit", 0.0) > _LATE_S else "",
        delay_s=round(record.delay_s, 3) if record.delay_s > _LATE_S else None,
        **stages,
    )


def _failure(attempt: Attempt) -> str:
    """Its code, workers, stage and seconds, as `baton why --log` reads it."""
    workers = "->".join(filter(None, (attempt.prefill, attempt.decode)))
    return f"{attempt.outcome} {workers} {attempt.ended_in} {sum(attempt.stages.values()):.3f}"


@asynccontextmanager
async def logging_load(services: Services, every_s: int = BUSY_EVERY_S) -> AsyncGenerator[None, None]:
    """In this context throughput and load are logged every so often while there are requests."""
    task = asyncio.create_task(_log_load(services, every_s))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _log_load(services: Services, every_s: int) -> None:
    while True:
        await asyncio.sleep(every_s)  # between two lines
        counts = services.snapshots.series.lately(every_s)
        num_running = int(services.metrics.total("running_requests"))
        if counts["ended"] or num_running:
            stats = [each for _, each in await services.fleet.stats()]
            num_used, num_blocks = sum(s.kv_used_blocks for s in stats), sum(s.kv_blocks for s in stats)
            num_queued = int(services.metrics.total("queued_requests"))
            fields = {
                "tokens_per_s": counts["tokens"] / every_s,
                "requests_per_s": counts["ended"] / every_s,
                "running": num_running - num_queued,
                "queued": num_queued,
                "refused": counts["refused"],
                "kv_used": f"{num_used / num_blocks:.0%}" if num_blocks else "",
            }
            log.info(Line("load", **fields))
