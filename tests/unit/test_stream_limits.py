"""Limits on a worker's cost to its caller: deadlines, leftovers, credit, silence."""

import asyncio
from contextlib import aclosing

import pytest

from baton import frames
from baton.errors import BatonError, BrokerLost, DeadlineExceeded, WorkerLost, WorkerUnreached
from baton.frames import Beat, Cancel, Credit, End, Goodbye, Hello, Next
from baton.messages import TokenChunk
from baton.pace import Pace
from baton.streams import WINDOW, CallerLink, Service
from tests.clock import jumping
from tests.links import PACE, Linked, Pair, RawCaller, Sent, a_request, frame
from tests.planes import count_up, first_tokens, tokens


@jumping
async def test_the_caller_keeps_the_deadline_of_a_worker_that_hangs() -> None:
    wire = Sent()
    link = CallerLink(wire, "w", PACE)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(DeadlineExceeded):
        await tokens(Linked(link).call("w", a_request(deadline_s=7.0)))
    assert loop.time() - began_s == pytest.approx(7.0)
    await asyncio.sleep(0)  # frames leave at the end of a turn
    assert Cancel(1) in frames.FROM_CALLER.decode(wire.frames[-1])[1]


@jumping
async def test_the_caller_gives_no_more_credit_than_it_has_consumed() -> None:
    pair = Pair(count_up)
    async with aclosing(pair.call(a_request(10 * WINDOW))) as replies:
        assert len(await first_tokens(replies, 5 * WINDOW)) == 5 * WINDOW
    await asyncio.sleep(1)  # everything sent has arrived
    sent = [each for one in pair.to_worker.frames for each in frames.FROM_CALLER.decode(one)[1]]
    given = sum(each.num_replies for each in sent if isinstance(each, Credit))
    assert 4 * WINDOW <= given <= 5 * WINDOW
    assert WINDOW == 256


@jumping
async def test_a_silent_worker_is_lost_after_some_ticks_a_caller_after_five_times_as_many() -> None:
    pace = Pace(tick_s=1.0, num_silent=4)
    link = CallerLink(Sent(), "w", pace)
    link.open(a_request())
    caller = RawCaller(Service("w", count_up, pace))
    await asyncio.sleep(2.5)
    link.receive(frame(0, Hello(frames.VERSION, "w")))
    caller.say(Hello(frames.VERSION, "w"))
    reasons = []
    for wait_s in (3, 1):
        await asyncio.sleep(wait_s)
        reasons.append(link.lost)
    assert reasons == [None, "it does not respond"]  # 4 ticks after the frame
    await asyncio.sleep(15)
    assert not caller.heard(Goodbye)
    await asyncio.sleep(1)
    assert caller.heard(Goodbye) == [Goodbye("the caller is silent")]


@jumping
async def test_a_call_on_a_link_that_has_been_silent_fails_at_once() -> None:
    pace = Pace(tick_s=1.0, num_silent=4)
    silent, frozen, heard = (CallerLink(Sent(), "w", pace) for _ in range(3))
    await asyncio.sleep(1.5)
    frozen.receive(frame(0, Hello(frames.VERSION, "w")))
    await asyncio.sleep(8)
    assert silent.lost is frozen.lost is None
    for link in (silent, frozen):
        call = link.open(a_request())
        assert type(call.error) is WorkerUnreached
        with pytest.raises(WorkerUnreached, match="it does not respond"):
            link.open(a_request())
    heard.receive(frame(0, Hello(frames.VERSION, "w")))
    heard.open(a_request())
    assert heard.lost is None


@pytest.mark.parametrize(
    ("num_before", "num_since", "error"),
    [(0, 0, WorkerUnreached), (0, 1, WorkerLost), (1, 0, WorkerLost), (1, 1, WorkerLost)],
)
@jumping
async def test_a_worker_that_never_answered_on_a_new_link_never_got_the_request(
    num_before: int, num_since: int, error: type[WorkerLost]
) -> None:
    link = CallerLink(Sent(), "w", PACE)
    said = [frame(0, Hello(frames.VERSION, "w")), frame(1, Beat())]
    for each in said[:num_before]:
        link.receive(each)
    call = link.open(a_request())
    for each in said[num_before : num_before + num_since]:
        link.receive(each)
    link.lose("it was killed")
    assert type(call.error) is error


@jumping
async def test_silence_counts_while_there_are_calls() -> None:
    num_asked = 0

    def ask() -> None:
        nonlocal num_asked
        num_asked += 1

    link = CallerLink(Sent(), "w", Pace(tick_s=1.0, num_silent=4), on_silence=ask)
    await asyncio.sleep(9.5)
    link.lose_if_silent()
    assert (num_asked, link.lost) == (0, None)
    link.open(a_request())
    assert num_asked == 1
    await asyncio.sleep(1)
    assert num_asked == 2
    link.receive(frame(0, Hello(frames.VERSION, "w")))
    link.lose_if_silent()
    assert link.lost is None
    await asyncio.sleep(4)
    assert num_asked == 3
    link.lose_if_silent()
    assert link.lost == "it does not respond"


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
