"""The Transport contract, for both planes: streams, cancellation, errors, limits, shutdown."""

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec
import pytest

from baton import errors, frames
from baton.errors import BatonError, EngineFailure, InvalidRequest, WorkerLost, WorkerUnreached
from baton.messages import (
    GenerateRequest,
    Reply,
    Request,
    StatsRequest,
    TokenChunk,
    TokenLogprob,
    Usage,
    WorkerStats,
)
from baton.streams import WINDOW
from baton.transport import Transport
from tests.certificates import Authority
from tests.planes import HANDOFF, Endless, Plane, Stream, a_request, count_up, first_tokens, tokens
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.loops("uvloop", "asyncio")

_NOT_DYNAMOS = {
    "test_one_process_may_call_its_own_worker": "a process is one worker of Dynamo's",
    "test_everything_of_one_turn_travels_in_one_frame": "the bindings send each item",
    "test_a_slow_consumer_stops_its_own_generator_only": "the bindings buffer without a limit",
}


@pytest.fixture(
    params=["tcp", "tls", "unix", "nats", "dynamo", pytest.param("dynamo-nats", marks=pytest.mark.slow)]
)
def plane(
    request: pytest.FixtureRequest,
    nats_server: str,
    shared_authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Plane:
    if request.param.startswith("dynamo"):
        pytest.importorskip("dynamo.runtime", reason="there is no wheel for this platform")
        if (reason := _NOT_DYNAMOS.get(request.node.originalname)) is not None:
            pytest.skip(reason)
        monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
        monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
        monkeypatch.setenv("DYN_REQUEST_PLANE", "nats" if request.param == "dynamo-nats" else "tcp")
        monkeypatch.setenv("NATS_SERVER", nats_server)
        # Here two runtimes share a process; with one thread they can wait for each other.
        monkeypatch.setenv("DYN_RUNTIME_NUM_WORKER_THREADS", "4")
    return Plane(request.param, nats_server)


async def test_request_and_replies_arrive_as_they_were_sent(caller: Transport, worker: Transport) -> None:
    sent: list[Reply] = [
        HANDOFF,
        WorkerStats(num_running=3, kv_move_s=0.25),
        TokenChunk(token_ids=()),
        TokenChunk(
            token_ids=(200_002,),
            finish_reason="stop",
            usage=Usage(1, 2, 3),
            logprobs=(TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.0))),),
        ),
    ]
    seen: list[Request] = []

    async def answer(request: Request) -> Stream:
        seen.append(request)
        for reply in sent:
            yield reply

    async with worker.serve("dots.and spaces>*/é", answer) as address:
        assert [reply async for reply in caller.call(address, a_request())] == sent
        assert [reply async for reply in caller.call(address, StatsRequest())] == sent
    assert seen == [a_request(), StatsRequest()]


async def test_ten_thousand_replies_arrive_in_order(caller: Transport, worker: Transport) -> None:
    async with worker.serve("w", count_up) as address:
        assert await tokens(caller.call(address, a_request(10_000))) == list(range(10_000))


async def test_256_streams_at_once_keep_apart(caller: Transport, worker: Transport) -> None:
    async with worker.serve("w", count_up) as address:
        streams = (tokens(caller.call(address, a_request(length))) for length in range(256))
        assert await asyncio.gather(*streams) == [list(range(length)) for length in range(256)]


async def test_one_process_may_call_its_own_worker(caller: Transport) -> None:
    async with caller.serve("a", count_up) as one, caller.serve("b", count_up) as other:
        assert one != other
        assert await tokens(caller.call(one, a_request(4))) == [0, 1, 2, 3]
        assert await tokens(caller.call(other, a_request(2))) == [0, 1]


async def test_everything_of_one_turn_travels_in_one_frame(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    really_open = frames.FrameReader.open

    def counting_open(self: frames.FrameReader[frames.ToCaller], frame: bytes) -> list[frames.ToCaller]:
        envelopes = really_open(self, frame)
        sizes.append(sum(isinstance(envelope, frames.Next) for envelope in envelopes))
        return envelopes

    monkeypatch.setattr(frames.FrameReader, "open", counting_open)
    async with plane.ends() as (caller, worker):
        step = asyncio.Event()
        num_waiting = 0

        async def stepwise(_: Request) -> Stream:
            nonlocal num_waiting
            num_waiting += 1
            await step.wait()
            yield TokenChunk(token_ids=(1,))
            yield TokenChunk(token_ids=(2,))

        async with worker.serve("w", stepwise) as address:
            running = [asyncio.ensure_future(tokens(caller.call(address, a_request()))) for _ in range(64)]
            await until(lambda: num_waiting == 64)
            step.set()
            assert await asyncio.gather(*running) == [[1, 2]] * 64
        assert [size for size in sizes if size] == [128]


@pytest.mark.parametrize("num_consumed", [0, 1, 50])
async def test_to_stop_iterating_closes_the_workers_generator(
    caller: Transport, worker: Transport, num_consumed: int
) -> None:
    endless = Endless(num_replies=num_consumed)
    async with worker.serve("w", endless.answer) as address:
        stream = caller.call(address, a_request())
        assert await first_tokens(stream, num_consumed) == list(range(num_consumed))
        if num_consumed:
            await stream.aclose()
        else:
            waiting = asyncio.ensure_future(anext(stream))
            await endless.running.wait()
            waiting.cancel()
            await asyncio.wait({waiting})
        async with asyncio.timeout(PATIENCE_S):
            await endless.closed.wait()


@pytest.mark.parametrize(
    "failure",
    [
        error("say so", param="messages", retry_after_s=2.5)
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, BatonError)
        if error is not WorkerUnreached  # the caller's own finding
    ],
    ids=lambda failure: str(failure.code),
)
async def test_an_error_arrives_as_the_class_it_was(
    caller: Transport, worker: Transport, failure: BatonError
) -> None:
    async def answer(_: Request) -> Stream:
        yield TokenChunk(token_ids=(1,))
        raise failure

    async with worker.serve("w", answer) as address:
        stream = caller.call(address, a_request())
        assert await anext(stream) == TokenChunk(token_ids=(1,))
        with pytest.raises(BatonError) as caught:
            await anext(stream)
        assert type(caught.value) is type(failure)
        assert caught.value.to_wire() == failure.to_wire()


async def test_any_other_exception_arrives_as_engine_failure_without_its_secrets(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: Request) -> Stream:
        yield TokenChunk(token_ids=(1,))
        raise RuntimeError("password=hunter2")

    with caplog.at_level(logging.ERROR):
        async with plane.ends() as (caller, worker), worker.serve("w", answer) as address:
            with pytest.raises(EngineFailure) as caught:
                await tokens(caller.call(address, a_request()))
            assert "r1" in caught.value.message
            assert "hunter2" not in caught.value.message
    assert "hunter2" in caplog.text


async def test_the_longest_context_travels_in_one_request(caller: Transport, worker: Transport) -> None:
    async def answer(request: Request) -> Stream:
        assert isinstance(request, GenerateRequest)
        yield TokenChunk(token_ids=(sum(request.token_ids),))

    token_ids = [200_000] * 131_072
    async with worker.serve("w", answer) as address:
        request = a_request(token_ids=token_ids)
        assert await tokens(caller.call(address, request)) == [sum(token_ids)]
        several = (tokens(caller.call(address, request)) for _ in range(4))
        assert await asyncio.gather(*several) == [[sum(token_ids)]] * 4


async def test_a_request_too_big_for_the_plane_fails_alone(caller: Transport, worker: Transport) -> None:
    async with worker.serve("w", count_up) as address:
        running = caller.call(address, a_request(2))
        first = await first_tokens(running, 1)
        big = a_request(token_ids=[200_000] * 4_000_000)
        with pytest.raises(InvalidRequest, match=r"\d+ bytes .* limit of \d+"):
            await tokens(caller.call(address, big))
        assert first + await tokens(running) == [0, 1]


async def test_a_worker_that_goes_on_for_ever_ends_at_the_deadline(
    caller: Transport, worker: Transport
) -> None:
    endless = Endless()
    async with worker.serve("w", endless.answer) as address:
        overdue = msgspec.structs.replace(a_request(), deadline_s=0.2)
        with pytest.raises(errors.DeadlineExceeded):
            await tokens(caller.call(address, overdue))
        await endless.closed.wait()


async def test_a_slow_consumer_stops_its_own_generator_only(caller: Transport, worker: Transport) -> None:
    num_made = dict.fromkeys(("slow", "fast"), 0)

    async def answer(request: Request) -> Stream:
        assert isinstance(request, GenerateRequest)
        async for reply in count_up(request):
            num_made[request.request_id] += 1
            yield reply

    async with worker.serve("w", answer) as address:
        slow = caller.call(address, msgspec.structs.replace(a_request(20_000), request_id="slow"))
        first = await first_tokens(slow, 1)
        fast = caller.call(address, msgspec.structs.replace(a_request(20_000), request_id="fast"))
        assert await tokens(fast) == list(range(20_000))
        assert num_made["slow"] <= WINDOW
        assert first + await tokens(slow) == list(range(20_000))


async def test_a_worker_that_leaves_refuses_new_calls_and_ends_running_ones(
    caller: Transport, worker: Transport
) -> None:
    endless = Endless()
    endless.may_close.clear()
    async with contextlib.AsyncExitStack() as context:
        address = await context.enter_async_context(worker.serve("w", endless.answer))
        running = caller.call(address, a_request())
        await anext(running)
        leaving = asyncio.ensure_future(context.aclose())
        await endless.closed.wait()
        with pytest.raises(WorkerLost):
            await anext(running)
        with pytest.raises(WorkerLost):
            await anext(caller.call(address, a_request()))
        endless.may_close.set()
        await leaving
    with pytest.raises(WorkerLost):
        await anext(caller.call(address, a_request()))


async def test_a_worker_that_its_caller_gives_up_notices_and_can_be_called_again(
    caller: Transport, worker: Transport
) -> None:
    endless = Endless()
    async with worker.serve("w", endless.answer) as address:
        running = caller.call(address, a_request())
        await anext(running)
        caller.lose("another", "no call runs there")
        caller.lose(address, "its engine hangs")
        with pytest.raises(WorkerLost, match="its engine hangs"):
            await anext(running)
        await until(endless.closed.is_set)
        again = caller.call(address, a_request())
        await anext(again)
        await again.aclose()


@pytest.mark.parametrize(
    "address", ["", "http://127.0.0.1:80/", "tcp://127.0.0.1:x/w", "tcp://h", "nats://x", "tcp://a..b:1/w"]
)
async def test_an_address_of_another_plane_is_a_lost_worker(caller: Transport, address: str) -> None:
    with pytest.raises(WorkerLost):
        await anext(caller.call(address, a_request()))


async def test_the_address_of_an_earlier_worker_is_a_lost_worker_at_once(
    caller: Transport, worker: Transport
) -> None:
    async with worker.serve("w", count_up) as address:
        place, mark, key = address.partition("#")
        stale = f"{place[:-4]}0000{mark}{key}"
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(WorkerLost):
                await anext(caller.call(stale, a_request()))
        assert await tokens(caller.call(address, a_request(1))) == [0]
