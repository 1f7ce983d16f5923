"""What a request holds at workers while it runs, what others learn of its failure, and answers made again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.errors import EngineFailure, HandoffFailed, HandoffStalled, NotResumable, WorkerLost
from baton.messages import (
    GenerateRequest,
    Reply,
    TokenChunk,
    TokenLogprob,
    Usage,
    WorkerInfo,
)
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.routing.router import RoutingSettings
from tests.clock import jumping
from tests.scripted_workers import (
    Script,
    ScriptedWorkers,
    answer,
    failing,
    generate,
    generator_over,
    hand_off,
    hand_off_with_first,
    hang,
    in_turn,
    request,
    sampled,
    script,
    token_ids_of,
)
from tests.waiting import until

WHOLE = [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("prefill", "decode", "is_let_in"),
    [
        (hand_off, hang, False),
        (hand_off, script(TokenChunk((10,)), None), True),
        (hand_off_with_first, hang, True),
    ],
)
@jumping
async def test_the_next_request_goes_to_prefill_when_this_one_has_a_token(
    prefill: Script, decode: Script, is_let_in: bool
) -> None:
    fleet = ScriptedWorkers(p1=prefill, d1=decode, d2=decode)
    fleet.max_batch_size = 1
    async with generator_over(fleet) as generator:
        tasks = [asyncio.create_task(token_ids_of(generator, 600)) for _ in range(2)]
        await asyncio.sleep(5)
        assert fleet.called.count("p1") == 1 + is_let_in
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("error", "called_later"),
    [(HandoffFailed("expired"), ["p1", "d1"]), (HandoffStalled("nothing came"), ["d1"])],
)
async def test_only_a_pair_between_which_nothing_moves_is_left_out(
    error: HandoffFailed, called_later: list[str]
) -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=in_turn(failing(error), answer))
    async with generator_over(fleet) as generator:
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]
    assert fleet.called == ["p1", "d1", "d1", *called_later]


@pytest.mark.parametrize(
    ("num_moved_bytes", "is_read_to_its_end", "num_observed"),
    [(4096, True, 1), (0, True, 1), (None, True, 0), (4096, False, 1)],
)
async def test_the_kv_that_moved_for_an_answer_is_counted_once(
    num_moved_bytes: int | None, is_read_to_its_end: bool, num_observed: int
) -> None:
    chunks = [
        TokenChunk((10,), None, Usage(2, 0, 1, num_moved_bytes)),
        TokenChunk((11,), "stop", Usage(2, 0, 2, num_moved_bytes)),
    ]
    fleet = ScriptedWorkers(p1=hand_off, d1=script(*chunks))
    record = fleet.metrics.begin("/v1/x")
    async with (
        generator_over(fleet) as generator,
        aclosing(generator.generate(request(), leg=record.leg())) as answered,
    ):
        async for _ in answered:
            if not is_read_to_its_end:
                break
    fleet.metrics.end(record)
    name = "baton_request_moved_kv_bytes"
    counted = sampled(fleet.metrics, f"{name}_count"), sampled(fleet.metrics, f"{name}_sum")
    assert counted == (num_observed, num_moved_bytes or 0)


@asynccontextmanager
async def crowd(fleet: ScriptedWorkers, *models: str, num_processes: int = 1) -> AsyncGenerator[None, None]:
    """One request for each of these models, all at once and without an end."""
    live = Fleet(fleet, fleet, model_path=Path("/none"))
    async with live.keep_current():
        await until(lambda: live.health().instances)
        made = Generator(
            fleet, live, RoutingSettings(wait_for_worker_s=0), fleet.metrics, num_processes=num_processes
        )

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
        assert fleet.called == ["d1", "d2"]


@pytest.mark.parametrize(("num_processes", "num_running"), [(1, 4), (2, 2), (9, 1)])
@jumping
async def test_each_process_uses_its_part_of_the_places(num_processes: int, num_running: int) -> None:
    fleet = ScriptedWorkers(d1=hang)
    fleet.max_batch_size = 4
    async with crowd(fleet, *["m"] * 6, num_processes=num_processes):
        assert len(fleet.called) == num_running
    assert fleet.open == []


def from_the_beginning(*steps: int, tokens: tuple[int, ...] = (10, 11, 12, 13)) -> Script:
    """An engine that refuses to go on, and makes `tokens` in steps of so many."""

    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if sent.num_generated:
            raise NotResumable("not in the middle")
        position = 0
        for step in steps:
            ids, position = tokens[position : position + step], position + step
            is_last = position == len(tokens)
            logprobs = tuple(TokenLogprob(token_id, -0.5, ()) for token_id in ids)
            yield TokenChunk(
                ids, "stop" if is_last else None, Usage(2, 0, 4) if is_last else None, logprobs=logprobs
            )

    return script


@pytest.mark.parametrize("steps", [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3), (4,)])
@pytest.mark.parametrize("num_before", [1, 2, 3])
async def test_an_answer_is_made_again_and_goes_on_where_the_client_is(
    steps: tuple[int, ...], num_before: int
) -> None:
    lost = failing(WorkerLost("gone"), after=num_before)
    fleet = ScriptedWorkers(d1=lost, d2=from_the_beginning(*steps))
    async with generator_over(fleet) as generator:
        chunks = [chunk async for chunk in generator.generate(request())]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == WHOLE
    assert all(chunk.token_ids for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("stop", Usage(2, 0, 4))
    for chunk in chunks[num_before:]:
        assert tuple(each.token_id for each in chunk.logprobs or ()) == chunk.token_ids
    assert fleet.called == ["d1", "d2", "d2"]
    sent = fleet.calls[-1][1]
    assert (sent.token_ids, sent.num_generated) == ([1, 2], 0)


async def test_a_first_chunk_of_prefill_is_not_sent_twice() -> None:
    async def with_first(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if sent.num_generated:
            raise NotResumable("not in the middle")
        async for handoff in hand_off_with_first(sent):
            yield handoff

    lost = script(TokenChunk((11,)), WorkerLost("gone"))
    rest = script(TokenChunk((11,)), TokenChunk((12,)), TokenChunk((13,), "length"))
    fleet = ScriptedWorkers(p1=with_first, d1=lost, d2=rest)
    assert await generate(fleet) == WHOLE
    assert fleet.called == ["p1", "d1", "p1", "p1", "d2"]


@pytest.mark.parametrize(
    "again", [from_the_beginning(4, tokens=(10, 99, 12, 13)), from_the_beginning(1, tokens=(10,))]
)
async def test_another_answer_than_before_ends_with_an_error_and_no_other_token(again: Script) -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone"), after=2), d2=again)
    got: list[int] = []
    async with generator_over(fleet) as generator:
        with pytest.raises(EngineFailure):  # noqa: PT012  after some tokens
            async for chunk in generator.generate(request()):
                got.extend(chunk.token_ids)
    assert got == [10, 11]


async def test_an_engine_that_refuses_the_beginning_too_ends_the_request() -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone"), after=2), d2=failing(NotResumable("never")))
    with pytest.raises(NotResumable):
        await generate(fleet)
    assert fleet.called == ["d1", "d2", "d2"]
