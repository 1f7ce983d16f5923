"""Both ends of a link, connected without sockets: windows, limits, deadlines, silence, failures, ends."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from baton import frames
from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.frames import Beat, Cancel, Credit, End, Goodbye, Hello, Next, Open
from baton.messages import GenerateRequest, Reply, Request, TokenChunk, TokenLogprob, Usage, WorkerStats
from baton.pace import Pace
from baton.streams import MAX_CALLERS, WINDOW, CallerLink, Service, public_name
from baton.telemetry import unauthenticated
from tests.clock import jumping, now_s
from tests.links import PACE, Linked, Pair, RawCaller, Sent, a_request, frame, silent, turns
from tests.planes import count_up, first_tokens, tokens


@jumping
async def test_the_caller_keeps_the_deadline_of_a_worker_that_hangs() -> None:
    wire = Sent()
    link = CallerLink(wire, "w", PACE)
    began_s = now_s()
    with pytest.raises(DeadlineExceeded):
        await tokens(Linked(link).call("w", a_request(deadline_s=7.0)))
    assert now_s() - began_s == pytest.approx(7.0)
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
    await asyncio.sleep(15)  # virtual time
    assert not caller.heard(Goodbye)
    await asyncio.sleep(1)  # virtual time
    assert caller.heard(Goodbye) == [Goodbye("the caller is silent")]


@jumping
async def test_a_call_on_a_link_that_has_been_silent_fails_at_once() -> None:
    pace = Pace(tick_s=1.0, num_silent=4)
    silent, frozen, heard = (CallerLink(Sent(), "w", pace) for _ in range(3))
    await asyncio.sleep(1.5)
    frozen.receive(frame(0, Hello(frames.VERSION, "w")))
    await asyncio.sleep(8)  # virtual time
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
    ("num_before", "num_since", "lost_with", "error"),
    [
        (0, 0, WorkerLost, WorkerUnreached),
        (0, 1, WorkerLost, WorkerLost),
        (1, 0, WorkerLost, WorkerLost),
        (1, 1, WorkerLost, WorkerLost),
        (0, 0, BrokerLost, BrokerLost),
        (0, 1, BrokerLost, BrokerLost),
    ],
)
@jumping
async def test_a_worker_that_never_answered_on_a_new_link_never_got_the_request(
    num_before: int, num_since: int, lost_with: type[BatonError], error: type[BatonError]
) -> None:
    """And a worker is not lost with its broker."""
    link = CallerLink(Sent(), "w", PACE)
    sent = [frame(0, Hello(frames.VERSION, "w")), frame(1, Beat())]
    for each in sent[:num_before]:
        link.receive(each)
    call = link.open(a_request())
    for each in sent[num_before : num_before + num_since]:
        link.receive(each)
    link.lose("it was killed", lost_with)
    assert type(call.error) is error


@jumping
async def test_no_reply_follows_one_that_is_too_large_to_be_sent() -> None:
    async def answer(_: Request) -> AsyncGenerator[Reply, None]:
        for size in (1, 20_000, 2):  # in one turn of the event loop
            yield TokenChunk(token_ids=(7,) * size)

    async with aclosing(Pair(answer).call(a_request())) as replies:
        assert await anext(replies) == TokenChunk(token_ids=(7,))
        with pytest.raises(InvalidRequest, match="exceeds this request plane's limit"):
            await anext(replies)


@jumping
async def test_no_credit_lets_a_worker_send_more_than_one_window() -> None:
    service = Service("w", count_up, PACE)
    caller = RawCaller(service)
    caller.say(Hello(frames.VERSION, "w"), Open(1, a_request(10 * WINDOW)), Credit(1, 5 * WINDOW))
    await asyncio.sleep(1)  # time for what must not be sent
    assert len(caller.heard(Next)) == WINDOW
    caller.say(Credit(1, 5 * WINDOW))
    await asyncio.sleep(1)  # virtual time
    assert len(caller.heard(Next)) == 2 * WINDOW
    caller.say(Credit(1, 3))
    await asyncio.sleep(1)  # virtual time
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
async def test_a_stream_number_that_is_used_twice_breaks_the_link_of_a_known_caller() -> None:
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


PLAIN, OTHER = TokenChunk(token_ids=(1,)), TokenChunk(token_ids=(2, 3))
LAST = TokenChunk(token_ids=(4,), finish_reason="stop", usage=Usage(1, 0, 5))
BEGUN = TokenChunk(token_ids=(4,), usage=Usage(1, 1, 1))
SCORED = TokenChunk(token_ids=(5,), logprobs=(TokenLogprob(5, -0.5),))
FIRST = TokenChunk(token_ids=(6,), prompt_logprobs=(TokenLogprob(6, -0.5),))
STATS = WorkerStats(num_running=1)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ([PLAIN, OTHER, PLAIN], [TokenChunk(token_ids=(1, 2, 3, 1))]),
        ([PLAIN, LAST], [msgspec.structs.replace(LAST, token_ids=(1, 4))]),
        ([BEGUN, PLAIN, OTHER], [msgspec.structs.replace(BEGUN, token_ids=(4, 1, 2, 3))]),
        ([BEGUN, PLAIN, LAST], [msgspec.structs.replace(LAST, token_ids=(4, 1, 4))]),
        ([LAST, PLAIN], [LAST, PLAIN]),
        ([PLAIN, SCORED, PLAIN, OTHER], [PLAIN, SCORED, TokenChunk(token_ids=(1, 2, 3))]),
        ([FIRST, PLAIN], [FIRST, PLAIN]),
        ([PLAIN, FIRST], [PLAIN, FIRST]),
        ([PLAIN, STATS, PLAIN], [PLAIN, STATS, PLAIN]),
        ([PLAIN] * 130, [TokenChunk(token_ids=(1,) * num) for num in (64, 64, 2)]),
    ],
)
async def test_token_chunks_that_wait_for_the_consumer_are_one(
    sent: list[Reply], received: list[Reply]
) -> None:
    async def answer(_: Request) -> AsyncGenerator[Reply, None]:
        for reply in sent:
            yield reply

    assert [reply async for reply in Pair(answer).call(a_request())] == received


async def test_a_worker_that_ignores_the_window_is_cut_off() -> None:
    wire = Sent()
    link = CallerLink(wire, "w", PACE)
    call = link.open(a_request())
    flood = [Next(call.number, TokenChunk(token_ids=(1,)))] * (WINDOW + 1)
    link.receive(frame(0, Hello(frames.VERSION, "w"), *flood))
    assert isinstance(call.error, WorkerLost)
    assert wire.closed


async def test_a_request_that_cannot_be_encoded_is_invalid_and_fails_alone() -> None:
    pair = Pair(count_up)
    calls = (tokens(pair.call(a_request(seed=seed))) for seed in (0, 2**70))
    fine, bad = await asyncio.gather(*calls, return_exceptions=True)
    assert fine == [0]
    assert type(bad) is InvalidRequest


@pytest.mark.parametrize(
    ("reply", "failure"),
    [
        (TokenChunk(token_ids=(1,) * 500), InvalidRequest),
        (TokenChunk(token_ids=(2**70,)), EngineFailure),
        (TokenChunk(token_ids=(object(),)), EngineFailure),  # type: ignore[arg-type]  # wrong on purpose
    ],
)
async def test_a_reply_that_cannot_travel_fails_its_stream_alone(
    reply: TokenChunk, failure: type[BatonError]
) -> None:
    async def answer(request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, GenerateRequest)
        yield reply if request.sampling.seed else TokenChunk(token_ids=(0,))
        if request.sampling.seed:
            await asyncio.Event().wait()

    pair = Pair(answer, limit=300)
    fine, bad = await asyncio.gather(
        tokens(pair.call(a_request())), tokens(pair.call(a_request(seed=1))), return_exceptions=True
    )
    assert fine == [0]
    assert isinstance(bad, failure)
    await turns(lambda: not pair.service.tasks)


async def test_more_streams_than_the_limit_are_refused_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.streams.MAX_STREAMS", 64)
    pair = Pair(silent, limit=frames.MAX_FRAME_BYTES)
    request = a_request(deadline_s=3600.0)
    running = [asyncio.ensure_future(tokens(pair.call(request))) for _ in range(64)]
    await turns(lambda: len(pair.service.tasks) == 64)
    with pytest.raises(Overloaded) as full:
        await tokens(pair.call(a_request()))
    assert full.value.retry_after_s == 1.0
    pair.caller.lose("test")
    lost = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(each, WorkerLost) for each in lost)
    await turns(lambda: not pair.service.tasks)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("tcp://10.0.0.1:4000/decode-1.5ec6e7", "tcp://10.0.0.1:4000/decode-1"),
        ("nats://baton.v1.worker.decode-1.5ec6#e7", "nats://baton.v1.worker.decode-1"),
        ("decode.1.5ec6e7", "decode.1"),
        ("w", "w"),
    ],
)
def test_messages_do_not_contain_the_secret_of_a_name(address: str, shown: str) -> None:
    assert public_name(address) == shown
