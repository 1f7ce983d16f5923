"""Limits on a caller's cost to its worker: credit, streams, links, generators that do not close."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from baton import frames
from baton.frames import Cancel, Credit, End, Goodbye, Hello, Next, Open, Signal
from baton.messages import Reply, Request, TokenChunk
from baton.streams import MAX_CALLERS, WINDOW, Service
from baton.telemetry import unauthenticated
from tests.clock import jumping
from tests.generators import none_abandoned
from tests.links import PACE, Pair, RawCaller, a_request, silent, turns
from tests.planes import count_up


@jumping
async def test_no_credit_lets_a_worker_send_more_than_one_window() -> None:
    service = Service("w", count_up, PACE)
    caller = RawCaller(service)
    caller.say(Hello(frames.VERSION, "w"), Open(1, a_request(10 * WINDOW)), Credit(1, 5 * WINDOW))
    await asyncio.sleep(1)  # time for what must not be sent
    assert len(caller.heard(Next)) == WINDOW
    caller.say(Credit(1, 5 * WINDOW))
    await asyncio.sleep(1)
    assert len(caller.heard(Next)) == 2 * WINDOW
    caller.say(Credit(1, 3))
    await asyncio.sleep(1)
    assert len(caller.heard(Next)) == 2 * WINDOW + 3
    caller.link.lose("test")
    await turns(lambda: not service.tasks)


@jumping
async def test_credit_and_cancel_of_an_unknown_stream_are_ignored() -> None:
    service = Service("w", count_up, PACE)
    caller = RawCaller(service)
    caller.say(Hello(frames.VERSION, "w"), Credit(9, 1), Cancel(9), Open(1, a_request()))
    await turns(lambda: caller.heard(End) == [End(1)])


@jumping
async def test_a_generator_waits_before_its_second_reply_while_the_wire_is_full() -> None:
    caller = RawCaller(Service("w", count_up, PACE))
    caller.wire.writable.clear()
    caller.say(Hello(frames.VERSION, "w"), Open(1, a_request(100)))
    await asyncio.sleep(1)  # time for what must not be sent
    assert len(caller.heard(Next)) == 1
    caller.wire.writable.set()
    await turns(lambda: caller.heard(End) == [End(1)])


@pytest.mark.parametrize("last", [[Cancel(1)], [Cancel(1), Credit(1, 5)], [Goodbye("I leave")]])
@jumping
async def test_a_generator_that_waits_for_credit_is_closed_with_its_call(last: list[Signal]) -> None:
    service = Service("w", count_up, PACE)
    caller = RawCaller(service)
    with none_abandoned():
        caller.say(Hello(frames.VERSION, "w"), Open(1, a_request(10 * WINDOW)))
        await turns(lambda: len(caller.heard(Next)) == WINDOW)
        caller.say(*last)
        await turns(lambda: not service.tasks)


@jumping
async def test_a_stream_number_that_is_used_twice_breaks_the_link_of_a_caller_that_is_no_stranger() -> None:
    num_strange = unauthenticated.num_messages
    service = Service("w", silent, PACE)
    caller = RawCaller(service)
    caller.say(Hello(frames.VERSION, "w"), Open(1, a_request()), Open(1, a_request()))
    assert caller.wire.closed
    assert caller.heard(Goodbye) == [Goodbye("stream 1 was opened twice")]
    assert unauthenticated.num_messages == num_strange
    await turns(lambda: not service.tasks)


@jumping
async def test_one_caller_more_than_the_limit_is_sent_away_and_the_others_stay() -> None:
    service = Service("w", count_up, PACE)
    callers = [RawCaller(service) for _ in range(MAX_CALLERS)]
    for caller in callers:
        caller.say(Hello(frames.VERSION, "w"))
    one_more = RawCaller(service)
    one_more.say(Hello(frames.VERSION, "w"))
    assert one_more.heard(Goodbye) == [Goodbye("1024 callers are connected to this worker")]
    assert not any(caller.wire.closed for caller in callers)
    callers[0].say(Goodbye("I leave"))
    next_one = RawCaller(service)
    next_one.say(Hello(frames.VERSION, "w"))
    assert not next_one.wire.closed


@jumping
async def test_a_generator_that_does_not_close_holds_up_the_end_for_five_seconds() -> None:
    stuck = asyncio.Event()

    async def stubborn(_: Request) -> AsyncGenerator[Reply, None]:
        try:
            yield TokenChunk(token_ids=(0,))
            await asyncio.Event().wait()
        finally:
            await stuck.wait()

    pair = Pair(stubborn)
    await anext(pair.call(a_request()))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await pair.service.stop()
    assert loop.time() - began_s == pytest.approx(5.0)
    assert not pair.service.links
    stuck.set()
