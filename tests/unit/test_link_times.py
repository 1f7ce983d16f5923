"""When a link is idle or lost: its pace, calls between ticks, and whom a loss is blamed on."""

import asyncio

import pytest

from baton import frames
from baton.errors import BatonError, BrokerLost, WorkerLost, WorkerUnreached
from baton.frames import End, Goodbye, Hello, Next
from baton.messages import TokenChunk
from baton.pace import Pace
from baton.streams import CallerLink
from tests.clock import jumping
from tests.links import PACE, Sent, a_request, frame


@pytest.mark.parametrize(
    ("liveness_s", "pace"),
    [
        (2.0, Pace(tick_s=0.25, num_silent=8, num_idle=240)),
        (30.0, Pace(tick_s=0.25, num_silent=120, num_idle=240)),
        (0.4, Pace(tick_s=0.1, num_silent=4, num_idle=600)),
    ],
)
def test_a_link_ticks_four_times_in_its_liveness_limit_at_least(liveness_s: float, pace: Pace) -> None:
    assert Pace.of(liveness_s) == pace


@jumping
async def test_a_link_that_gets_a_call_now_and_then_is_not_idle() -> None:
    link = CallerLink(Sent(), "w", Pace(tick_s=1.0, num_silent=1000, num_idle=3))
    await asyncio.sleep(2.5)
    link.leave(link.open(a_request()))  # between two ticks
    reasons = []
    for wait_s in (2, 1):
        await asyncio.sleep(wait_s)
        reasons.append(link.lost)
    assert reasons == [None, "idle"]


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize(("error", "unheard"), [(BrokerLost, BrokerLost), (WorkerLost, WorkerUnreached)])
@jumping
async def test_a_worker_is_not_blamed_for_its_broker(
    error: type[BatonError], unheard: type[BatonError], is_heard: bool
) -> None:
    link = CallerLink(Sent(), "w", PACE)
    call = link.open(a_request())
    if is_heard:
        link.receive(frame(0, Hello(frames.VERSION, "w")))
    link.lose("gone", error)
    assert type(call.error) is (error if is_heard else unheard)


@jumping
async def test_nothing_counts_that_a_worker_says_after_its_goodbye() -> None:
    link = CallerLink(Sent(), "w", PACE)
    call = link.open(a_request())
    late = Next(call.number, TokenChunk(token_ids=(1,))), End(call.number)
    link.receive(frame(0, Hello(frames.VERSION, "w"), Goodbye("I stop"), *late))
    assert isinstance(call.error, WorkerLost)
    assert not call.replies
