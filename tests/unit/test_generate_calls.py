"""What a request holds at workers while it runs: calls, places, and what others learn of its failure."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.errors import HandoffFailed, HandoffStalled, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, PrefillFirst, Reply, TokenChunk, Usage, WorkerInfo
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from tests.clock import jumping
from tests.scripted_workers import (
    Script,
    ScriptedWorkers,
    answer,
    failing,
    generate,
    generator_over,
    hand_off,
    in_turn,
    request,
    sampled,
)
from tests.waiting import until

WHOLE = [10, 11, 12, 13]


async def hang(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    await asyncio.Event().wait()
    yield TokenChunk(())


async def token_then_hang(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    yield TokenChunk((10,))
    await asyncio.Event().wait()


async def hand_off_with_first(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    async for reply in hand_off(asked):
        assert isinstance(reply, KvHandoff)
        yield msgspec.structs.replace(reply, first_chunk=TokenChunk((10,)))


async def test_the_question_to_decode_is_closed_before_prefill_is_asked() -> None:
    open_calls: list[list[str]] = []

    async def noting(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        open_calls.append(fleet.open.copy())
        async for reply in hand_off(asked):
            yield reply

    async def lacking(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.handoff is None:
            yield PrefillFirst(51, False)
            await asyncio.Event().wait()
        async for reply in answer(asked):
            yield reply

    fleet = ScriptedWorkers(p1=noting, d1=lacking)
    async with generator_over(fleet, local_prefill_tokens=50) as generator:
        assert [i async for c in generator.generate(request()) for i in c.token_ids] == WHOLE
    assert open_calls == [["p1"]]


@pytest.mark.parametrize(
    ("prefill", "decode", "is_let_in"),
    [(hand_off, hang, False), (hand_off, token_then_hang, True), (hand_off_with_first, hang, True)],
)
@jumping
async def test_the_next_request_goes_to_prefill_when_this_one_has_a_token(
    prefill: Script, decode: Script, is_let_in: bool
) -> None:
    fleet = ScriptedWorkers(p1=prefill, d1=decode, d2=decode)
    fleet.max_batch_size = 1
    async with generator_over(fleet) as generator:

        async def one() -> None:
            async for _ in generator.generate(request(deadline_s=600)):
                pass

        tasks = [asyncio.create_task(one()) for _ in range(2)]
        await asyncio.sleep(5)
        assert fleet.asked.count("p1") == 1 + is_let_in
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "asked_later"),
    [(HandoffFailed("expired"), ["p1", "d1"]), (HandoffStalled("nothing came"), ["d1"])],
)
async def test_only_a_pair_between_which_nothing_moves_is_left_out(
    error: HandoffFailed, asked_later: list[str]
) -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=in_turn(failing(error), answer))
    async with generator_over(fleet) as generator:
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]
    assert fleet.asked == ["p1", "d1", "d1", *asked_later]


@pytest.mark.parametrize(("num_moved_bytes", "num_observed"), [(4096, 1), (0, 1), (None, 0)])
async def test_the_kv_that_moved_for_an_answer_is_counted_once(
    num_moved_bytes: int | None, num_observed: int
) -> None:
    async def telling(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((10,), None, Usage(2, 0, 1, num_moved_bytes))
        yield TokenChunk((11,), "stop", Usage(2, 0, 2, num_moved_bytes))

    fleet = ScriptedWorkers(p1=hand_off, d1=telling)
    assert await generate(fleet) == [10, 11]
    assert moved(fleet) == (num_observed, num_moved_bytes or 0)


def moved(fleet: ScriptedWorkers) -> tuple[float | None, float | None]:
    """(requests whose moved KV is counted, its bytes)."""
    name = "baton_request_moved_kv_bytes"
    return sampled(fleet.metrics, f"{name}_count"), sampled(fleet.metrics, f"{name}_sum")


async def test_the_kv_that_moved_is_counted_though_the_answer_is_not_read_to_its_end() -> None:
    async def telling(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((10,), None, Usage(2, 0, 1, 4096))
        await asyncio.Event().wait()

    fleet = ScriptedWorkers(p1=hand_off, d1=telling)
    async with (
        generator_over(fleet) as generator,
        aclosing(generator.generate(request())) as chunks,
    ):
        assert (await anext(chunks)).token_ids == (10,)
    assert moved(fleet) == (1, 4096)


async def test_the_last_worker_that_a_request_loses_gets_no_other_request() -> None:
    lost = failing(WorkerLost("gone"))
    fleet = ScriptedWorkers(d1=lost, d2=lost, d3=lost, d4=lost)
    async with generator_over(fleet, wait_for_worker_s=60) as generator:
        with pytest.raises(WorkerLost):
            assert [chunk async for chunk in generator.generate(request())]
        fleet.join("d5", answer)
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request(60))]
    assert sorted(fleet.asked[:4]) == ["d1", "d2", "d3", "d4"]
    assert fleet.asked[4:] == ["d5", "d5"]


@asynccontextmanager
async def crowd(fleet: ScriptedWorkers, *models: str, num_processes: int = 1) -> AsyncGenerator[None, None]:
    """One request for each of these models, all at once and without an end."""
    live = Fleet(fleet, fleet, model_path=Path("/none"))
    async with live.keep_current():
        await until(lambda: live.health().instances)
        made = Generator(fleet, live, "round-robin", fleet.metrics, num_processes=num_processes)

        async def one(model: str) -> None:
            async for _ in made.generate(msgspec.structs.replace(request(600), model=model)):
                pass

        tasks = [asyncio.create_task(one(model)) for model in models]
        await asyncio.sleep(5)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@jumping
async def test_each_model_has_a_queue_of_its_own() -> None:
    class TwoModels(ScriptedWorkers):
        async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
            async for live in super().watch():
                yield tuple(
                    msgspec.structs.replace(w, model="n" if w.worker_id == "d2" else "m") for w in live
                )

    fleet = TwoModels(d1=hang, d2=hang)
    fleet.max_batch_size = 1
    async with crowd(fleet, "m", "m", "n", "n"):
        assert fleet.asked == ["d1", "d2"]


@pytest.mark.parametrize(("num_processes", "num_running"), [(1, 4), (2, 2), (9, 1)])
@jumping
async def test_each_process_uses_its_part_of_the_places(num_processes: int, num_running: int) -> None:
    fleet = ScriptedWorkers(d1=hang)
    fleet.max_batch_size = 4
    async with crowd(fleet, *["m"] * 6, num_processes=num_processes):
        assert len(fleet.asked) == num_running
    assert fleet.open == []
