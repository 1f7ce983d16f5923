"""The access log: which requests get a line, and what is in it; a line about the load while there is any."""

import asyncio
import logging
from typing import Any

import pytest

from frontend.access import AccessMode, log_load, log_requests
from frontend.http.respond import Services
from frontend.metrics import Metrics
from frontend.record import Record
from tests.clock import jumping
from tests.scripted_frontend import ScriptedFleet, ScriptedTokens, alone
from tests.scripted_workers import worker


def ended(metrics: Metrics, duration_s: float = 0.1, **changes: Any) -> Record:
    record = metrics.begin("/v1/chat/completions", "r-1", "alice")
    for name, value in changes.items():
        setattr(record, name, value)
    record.began_s -= duration_s
    metrics.end(record)
    return record


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [(200, "INFO"), (200, "INFO"), (429, "INFO"), (499, "INFO"), (503, "WARNING")]),
        ("slow", [(200, "INFO"), (429, "INFO"), (499, "INFO"), (503, "WARNING")]),
        ("off", []),
    ],
)
def test_which_requests_get_a_line(
    mode: AccessMode, expected: list[tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    log_requests(metrics, mode)
    ended(metrics)
    ended(metrics, duration_s=1.1)
    for status in (429, 499, 503):
        ended(metrics, status=status)
    lines: list[Any] = [record.msg for record in caplog.records]
    levels = [record.levelname for record in caplog.records]
    assert list(zip([line.fields["status"] for line in lines], levels, strict=True)) == expected


def test_a_line_has_what_was_recorded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = Metrics()
    log_requests(metrics, "all")
    record = metrics.begin("/v1/completions", "r-1", "")
    record.address, record.model, record.first_token_s = "10.0.0.7", "m", 0.25
    record.num_prompt_tokens, record.num_cached_tokens, record.num_completion_tokens = 9, 4, 7
    record.stages["render"] = 0.0004
    leg = record.leg()
    for role in ("d1", "d2"):
        leg.on(worker("p1"))
        leg.on(worker(role))
        leg.failed("worker_lost")
    leg.gap_s, leg.gap_at = 0.125, 3
    leg.end()
    for attempt, lasted_s in zip(leg.attempts, (2.0, 0.0, 0.0), strict=True):
        attempt.stages = {"prefill": lasted_s}
    metrics.end(record)
    assert record.duration_s is not None
    assert str(caplog.records[0].msg) == (
        "request request_id=r-1 route=/v1/completions model=m status=200"
        f" duration_s={round(record.duration_s, 4)} ttft_s=0.25 prompt_tokens=9 cached_tokens=4"
        " completion_tokens=7 gap_s=0.125 gap_at=3 prefill=p1 decode=d2 client=10.0.0.7 attempts=2"
        ' failures="worker_lost p1->d1 prefill 2.000; worker_lost p1->d2 prefill 0.000" prefill_s=2.0'
    )


class Fleet(ScriptedFleet):
    """Generates 50 tokens a second."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = self

    def num_tokens(self) -> int:
        return round(50 * asyncio.get_running_loop().time())


@jumping
async def test_the_load_is_logged_while_there_is_any(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet: Any = Fleet()
    tokens: Any = ScriptedTokens("")
    services = Services(fleet=fleet, generator=tokens, others=alone)
    services.snapshots.start()
    log_load(services.metrics, services.snapshots)
    await asyncio.sleep(35)  # virtual time
    assert not caplog.records, "it is idle"
    for status in (200, 200, 429):
        ended(services.metrics, status=status)
    services.metrics.of("refused_requests", "waited").value += 1
    running, queued = (services.metrics.begin("/v1/completions") for _ in range(2))
    queued.leg(), queued.leg()
    services.metrics.of("queued_requests").value = 2
    await asyncio.sleep(20)  # virtual time
    services.metrics.end(running)
    services.metrics.records.end(queued)
    services.metrics.of("queued_requests").value = 0
    await asyncio.sleep(30)  # virtual time
    busy = "load tokens_per_s=50.0 requests_per_s="
    assert [str(record.msg) for record in caplog.records] == [
        f"{busy}0.3 running=1 queued=2 refused=1",
        f"{busy}0.0 running=1 queued=2 refused=0",
        f"{busy}0.1 running=0 queued=0 refused=0",
    ]
