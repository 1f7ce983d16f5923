"""Both ends of a link, connected without sockets: windows, limits, failures, ends."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton import frames
from baton.errors import BatonError, EngineFailure, InvalidRequest, Overloaded, WorkerLost
from baton.frames import Hello, Next
from baton.messages import GenerateRequest, Reply, Request, TokenChunk, TokenLogprob, Usage, WorkerStats
from baton.streams import MAX_STREAMS, WINDOW, CallerLink, public_name
from tests.links import PACE, Pair, Sent, a_request, frame, turns
from tests.planes import count_up, tokens

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
