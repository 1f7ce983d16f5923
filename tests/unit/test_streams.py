"""Both ends of a link, connected without sockets: windows, limits, failures, ends."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton import frames
from baton.errors import BatonError, EngineFailure, InvalidRequest, NotReady, Overloaded, WorkerLost
from baton.frames import Hello, Next
from baton.messages import GenerateRequest, Reply, Request, TokenChunk, TokenLogprob, Usage, WorkerStats
from baton.streams import MAX_STREAMS, WINDOW, CallerLink, public_name
from tests.links import PACE, Pair, Sent, a_request, frame, turns
from tests.planes import count_up, first_tokens, tokens


async def test_all_of_one_turn_leaves_in_one_frame() -> None:
    async def three(_: Request) -> AsyncGenerator[Reply, None]:
        for token_id in range(3):
            yield TokenChunk(token_ids=(token_id,))

    pair = Pair(three)
    results = await asyncio.gather(*(tokens(pair.call(a_request())) for _ in range(50)))
    assert results == [[0, 1, 2]] * 50
    assert len(pair.to_worker.frames) == 2  # the hello, then 50 requests
    assert len(pair.to_caller.frames) == 2  # the hello, then 50 answers


async def test_a_slow_consumer_holds_one_window_and_stops_no_other() -> None:
    num_made = 0

    async def endless(request: Request) -> AsyncGenerator[Reply, None]:
        nonlocal num_made
        async for reply in count_up(request):
            num_made += 1
            yield reply

    pair = Pair(endless)
    slow = pair.call(a_request(5 * WINDOW))
    first = await first_tokens(slow, 1)
    num_made_by_slow = num_made
    assert num_made_by_slow <= WINDOW
    assert await tokens(pair.call(a_request(3 * WINDOW))) == list(range(3 * WINDOW))
    assert num_made == num_made_by_slow + 3 * WINDOW
    assert first + await tokens(slow) == list(range(5 * WINDOW))


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


async def test_what_comes_while_the_consumer_is_busy_is_not_lost() -> None:
    async def stepwise(request: Request) -> AsyncGenerator[Reply, None]:
        async for reply in count_up(request):
            yield reply
            await asyncio.sleep(0)  # the next goes in another frame

    received: list[int] = []
    async for reply in Pair(stepwise).call(a_request(9)):
        assert isinstance(reply, TokenChunk)
        received += reply.token_ids
        for _ in range(40):
            await asyncio.sleep(0)  # turns in which the rest comes
    assert received == list(range(9))


async def test_a_request_over_the_limit_is_invalid_and_says_both_sizes() -> None:
    pair = Pair(count_up, limit=220)
    request = msgspec.structs.replace(a_request(), token_ids=[1] * 500)
    fine, bad = await asyncio.gather(
        tokens(pair.call(a_request())), tokens(pair.call(request)), return_exceptions=True
    )
    assert fine == [0]
    assert isinstance(bad, InvalidRequest)
    assert "bytes" in bad.message
    assert "220" in bad.message


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


async def test_an_engine_that_cancels_itself_is_reported() -> None:
    async def answer(_: Request) -> AsyncGenerator[Reply, None]:
        yield TokenChunk(token_ids=(0,))
        raise asyncio.CancelledError

    with pytest.raises(EngineFailure):
        await tokens(Pair(answer).call(a_request()))


async def test_more_streams_than_the_limit_are_refused_as_overload() -> None:
    async def forever(_: Request) -> AsyncGenerator[Reply, None]:
        await asyncio.Event().wait()
        yield TokenChunk(token_ids=())

    pair = Pair(forever, limit=frames.MAX_FRAME_BYTES)
    running = [asyncio.ensure_future(tokens(pair.call(a_request()))) for _ in range(MAX_STREAMS)]
    await turns(lambda: len(pair.service.tasks) == MAX_STREAMS)
    with pytest.raises(Overloaded) as full:
        await tokens(pair.call(a_request()))
    assert full.value.retry_after_s == 1.0
    assert MAX_STREAMS == 16_384
    pair.caller.lose("test")
    lost = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(each, WorkerLost) for each in lost)
    await turns(lambda: not pair.service.tasks)


async def test_a_stopping_worker_refuses_new_calls_and_loses_running_ones() -> None:
    closing, may_close, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(_: Request) -> AsyncGenerator[Reply, None]:
        try:
            yield TokenChunk(token_ids=(0,))
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()
            closed.set()

    pair = Pair(answer)
    running = pair.call(a_request())
    await anext(running)
    stopping = asyncio.ensure_future(pair.service.stop())
    await closing.wait()
    with pytest.raises(NotReady):
        await tokens(pair.call(a_request()))
    with pytest.raises(WorkerLost):
        await anext(running)
    pair.worker.lose("the caller has gone too")  # it must not interrupt the generator's `finally`
    may_close.set()
    await stopping
    assert closed.is_set()
    assert not pair.service.tasks
    await turns(lambda: pair.caller.lost is not None)


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
