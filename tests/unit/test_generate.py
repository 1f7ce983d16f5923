"""Orchestration: prefill, handoff, decode, and what happens when a worker is lost on the way."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    Reply,
    Request,
    Role,
    Sampling,
    TokenChunk,
    Usage,
    WorkerInfo,
)
from frontend.metrics import Metrics
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from tests.waiting import until

Script = Callable[[GenerateRequest], AsyncGenerator[Reply, None]]


class ScriptedFleet:
    """A transport and a discovery whose workers are scripts; it remembers what they were asked."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.calls: list[tuple[str, GenerateRequest]] = []
        self.open: list[str] = []

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, GenerateRequest)
        self.calls.append((address, request))
        self.open.append(address)
        try:
            async with aclosing(self.scripts[address](request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self.open.remove(address)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        yield tuple(worker(name) for name in sorted(self.scripts))
        await asyncio.Event().wait()

    def serve(self, worker_id: str, answer: object) -> AbstractAsyncContextManager[str]:
        raise NotImplementedError

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    @property
    def asked(self) -> list[str]:
        return [address for address, _ in self.calls]


def worker(name: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        incarnation=name,
        role=Role.PREFILL if name.startswith("p") else Role.DECODE,
        endpoint="dyn://a.b.c",
        model="m",
        model_path="/none",
        address=name,
        context_length=100,
        engine="scripted",
        engine_version="2" if name.endswith("x") else "1",
    )


def request() -> GenerateRequest:
    sampling = Sampling(max_tokens=4, seed=0)
    return GenerateRequest(request_id="r", model="m", token_ids=[1, 2], sampling=sampling, deadline_s=5.0)


async def hand_off(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    yield KvHandoff(
        worker_id="p", incarnation="p", first_token=10, num_prompt_tokens=2, ttl_s=9, engine_state=b"kv"
    )
    await asyncio.Event().wait()  # pinned until it is closed


async def answer(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    """Tokens 10, 11, 12, 13: as many as are still missing."""
    for position in range(asked.num_generated, 4):
        last = position == 3
        usage = Usage(2, 0, 4) if last else None
        yield TokenChunk((10 + position,), "length" if last else None, usage)


def failing(error: BatonError, after: int = 0) -> Script:
    async def script(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        for position in range(after):
            yield TokenChunk((10 + asked.num_generated + position,))
        raise error

    return script


@asynccontextmanager
async def generator_over(fleet: ScriptedFleet) -> AsyncGenerator[Generator, None]:
    live = Fleet(fleet, fleet, model_path=Path("/none"))
    async with live.keep_current():
        await until(lambda: live.health().instances)
        yield Generator(fleet, live, "round-robin", Metrics())


async def generate(fleet: ScriptedFleet) -> list[int]:
    tokens: list[int] = []
    async with generator_over(fleet) as generator:
        try:
            async for chunk in generator.generate(request()):
                tokens += chunk.token_ids
        finally:
            assert not fleet.open, "every call is closed with the request"
    return tokens


WHOLE = [10, 11, 12, 13]


def test_prefill_hands_its_baton_to_decode() -> None:
    fleet = ScriptedFleet(p1=hand_off, d1=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "d1"]
    assert fleet.calls[0][1].handoff is None
    assert fleet.calls[1][1].handoff is not None


def test_decodes_first_chunk_ends_the_prefill_call() -> None:
    open_calls: list[list[str]] = []

    async def watching(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for chunk in answer(asked):
            yield chunk
            open_calls.append(fleet.open.copy())

    fleet = ScriptedFleet(p1=hand_off, d1=watching)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert open_calls == [["d1"]] * 3


def test_without_a_prefill_worker_decode_prefills_by_itself() -> None:
    fleet = ScriptedFleet(d1=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.calls[0][1].handoff is None


def test_an_answer_that_its_first_token_ends_never_reaches_decode() -> None:
    async def ended(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((7,), "stop", Usage(2, 0, 1))

    fleet = ScriptedFleet(p1=ended, d1=answer)

    assert asyncio.run(generate(fleet)) == [7]
    assert fleet.asked == ["p1"]


def test_a_lost_prefill_worker_is_replaced_by_another() -> None:
    fleet = ScriptedFleet(p1=failing(WorkerLost("gone")), p2=hand_off, d1=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "p2", "d1"]


def test_when_every_prefill_worker_is_lost_decode_prefills_by_itself() -> None:
    fleet = ScriptedFleet(p1=failing(WorkerLost("gone")), d1=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "d1"]


def test_a_failed_handoff_is_prefilled_again_and_the_decode_worker_kept() -> None:
    tries = iter([failing(HandoffFailed("expired")), answer])
    fleet = ScriptedFleet(p1=hand_off, p2=hand_off, d1=lambda asked: next(tries)(asked))  # noqa: PLW0108  each call takes the next

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "d1", "p2", "d1"]


def test_a_prefill_worker_lost_before_the_kv_has_moved_is_replaced_at_once() -> None:
    async def lost_later(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for handoff in hand_off(asked):
            yield handoff
            raise WorkerLost("gone")

    async def waiting(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.handoff is not None and len(fleet.calls) == 2:
            await asyncio.Event().wait()  # for KV that does not come
        async for chunk in answer(asked):
            yield chunk

    fleet = ScriptedFleet(p1=lost_later, p2=hand_off, d1=waiting)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "d1", "p2", "d1"]


def test_a_stream_goes_on_from_another_decode_worker_without_loss_or_repetition() -> None:
    fleet = ScriptedFleet(p1=hand_off, d1=failing(WorkerLost("gone"), after=2), d2=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1", "d1", "p1", "d2"]
    resumed = fleet.calls[-1][1]
    assert (resumed.token_ids, resumed.num_generated) == ([1, 2, 10, 11], 2)
    assert 0 < resumed.deadline_s <= 5


def test_a_stream_that_ends_early_counts_as_a_lost_worker() -> None:
    async def cut(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((10,))

    assert asyncio.run(generate(ScriptedFleet(d1=cut, d2=answer))) == WHOLE


@pytest.mark.parametrize(
    ("scripts", "raised"),
    [
        ({"p1": hand_off}, NoWorkers),
        ({"d1": failing(WorkerLost("gone"), after=1)}, WorkerLost),
        ({"d1": failing(Overloaded("full"))}, Overloaded),
        ({"p1": failing(InvalidRequest("bad")), "d1": answer}, InvalidRequest),
        ({"p1": hand_off, "d1": failing(DeadlineExceeded("over"))}, DeadlineExceeded),
        ({f"d{i}": failing(WorkerLost("gone")) for i in range(9)}, WorkerLost),
    ],
)
def test_what_cannot_be_repaired_ends_with_its_name(
    scripts: dict[str, Script], raised: type[BatonError]
) -> None:
    fleet = ScriptedFleet(**scripts)

    with pytest.raises(raised):
        asyncio.run(generate(fleet))
    assert len(fleet.calls) <= 4


def test_a_full_worker_is_passed_over_for_one_with_room() -> None:
    fleet = ScriptedFleet(d1=failing(Overloaded("full")), d2=answer)

    assert asyncio.run(generate(fleet)) == WHOLE


def test_a_prefill_worker_that_no_decode_worker_can_take_kv_from_is_left_out() -> None:
    fleet = ScriptedFleet(p1x=hand_off, d1=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["d1"]


def test_decode_is_picked_among_those_that_can_take_the_kv() -> None:
    fleet = ScriptedFleet(p1x=hand_off, d1=failing(HandoffFailed("it cannot")), d2x=answer)

    assert asyncio.run(generate(fleet)) == WHOLE
    assert fleet.asked == ["p1x", "d2x"]


def test_a_lost_worker_is_avoided_by_the_next_requests_too() -> None:
    fleet = ScriptedFleet(d1=failing(WorkerLost("gone")), d2=answer)

    async def three_requests() -> None:
        async with generator_over(fleet) as generator:
            for _ in range(3):
                assert [chunk async for chunk in generator.generate(request())]

    asyncio.run(three_requests())

    assert fleet.asked == ["d1", "d2", "d2", "d2"]


def test_leaving_closes_the_calls_to_both_workers_in_any_phase() -> None:
    async def silent(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.Event().wait()
        yield TokenChunk(())

    async def leave(fleet: ScriptedFleet, open_calls: list[str]) -> None:
        async with generator_over(fleet) as generator, aclosing(generator.generate(request())) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            await until(lambda: fleet.open == open_calls)
            first.cancel()
            await asyncio.wait([first])
        assert fleet.open == []

    asyncio.run(leave(ScriptedFleet(p1=silent, d1=answer), ["p1"]))
    asyncio.run(leave(ScriptedFleet(p1=hand_off, d1=silent), ["p1", "d1"]))


def test_closing_half_way_closes_the_call_to_decode() -> None:
    fleet = ScriptedFleet(p1=hand_off, d1=answer)

    async def close_half_way() -> None:
        async with generator_over(fleet) as generator:
            async with aclosing(generator.generate(request())) as chunks:
                await anext(chunks)
                assert fleet.open == ["d1"]
            assert fleet.open == []

    asyncio.run(close_half_way())
