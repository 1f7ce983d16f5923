"""Orchestration: prefill, handoff, decode, and what happens when a worker is lost on the way."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    HandoffStalled,
    InvalidRequest,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.messages import NO_TOKEN, GenerateRequest, KvHandoff, PrefillFirst, Reply, TokenChunk, Usage
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.routing.health import Health
from tests.clock import run_jumping
from tests.generators import none_abandoned
from tests.scripted_workers import (
    Script,
    ScriptedWorkers,
    answer,
    failing,
    generate,
    generator_over,
    hand_off,
    request,
)
from tests.waiting import until

WHOLE = [10, 11, 12, 13]
DEMO = Path("models/demo")
NUM_IDS = 3072  # of the demo model


async def test_prefill_hands_its_baton_to_decode() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1"]
    assert fleet.calls[0][1].handoff is None
    assert fleet.calls[1][1].handoff is not None


async def hand_off_with_first(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
    async for reply in hand_off(asked):
        assert isinstance(reply, KvHandoff)
        yield msgspec.structs.replace(reply, first_chunk=TokenChunk((10 + asked.num_generated,)))


async def test_prefills_first_token_is_sent_before_decode_is_asked() -> None:
    fleet = ScriptedWorkers(p1=hand_off_with_first, d1=answer)
    async with generator_over(fleet) as generator, aclosing(generator.generate(request())) as chunks:
        assert (await anext(chunks)).token_ids == (10,)
        assert fleet.asked == ["p1"]
        assert [token async for chunk in chunks for token in chunk.token_ids] == WHOLE[1:]
    asked = fleet.calls[1][1]
    assert (asked.token_ids[-1], asked.num_generated) == (10, 1)
    assert asked.handoff is not None


async def test_a_token_that_prefill_sent_is_not_sent_again_if_decode_is_lost() -> None:
    fleet = ScriptedWorkers(p1=hand_off_with_first, d1=failing(WorkerLost("gone")), d2=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p1", "d2"]
    assert [asked.num_generated for _, asked in fleet.calls] == [0, 1, 1, 2]


async def test_decodes_first_chunk_ends_the_prefill_call() -> None:
    open_calls: list[list[str]] = []

    async def watching(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for chunk in answer(asked):
            yield chunk
            open_calls.append(fleet.open.copy())

    fleet = ScriptedWorkers(p1=hand_off, d1=watching)

    assert await generate(fleet) == WHOLE
    assert open_calls == [["d1"]] * 3


async def test_without_a_prefill_worker_decode_prefills_by_itself() -> None:
    fleet = ScriptedWorkers(d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.calls[0][1].handoff is None


async def test_an_answer_that_its_first_token_ends_never_reaches_decode() -> None:
    async def ended(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((7,), "stop", Usage(2, 0, 1))

    fleet = ScriptedWorkers(p1=ended, d1=answer)

    assert await generate(fleet) == [7]
    assert fleet.asked == ["p1"]


async def test_a_lost_prefill_worker_is_replaced_by_another() -> None:
    fleet = ScriptedWorkers(p1=failing(WorkerLost("gone")), p2=hand_off, d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "p2", "d1"]


async def test_when_every_prefill_worker_is_lost_decode_prefills_by_itself() -> None:
    fleet = ScriptedWorkers(p1=failing(WorkerLost("gone")), d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1"]


async def test_a_failed_handoff_is_prefilled_again_and_the_decode_worker_kept() -> None:
    tries = iter([failing(HandoffFailed("expired")), answer])
    fleet = ScriptedWorkers(p1=hand_off, p2=hand_off, d1=lambda asked: next(tries)(asked))  # noqa: PLW0108  each call takes the next

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p2", "d1"]


async def test_each_failed_handoff_is_the_fault_of_its_own_prefill_worker() -> None:
    expired = failing(HandoffFailed("expired"))
    tries = iter([expired, expired, answer])
    fleet = ScriptedWorkers(p1=hand_off, p2=hand_off, d1=lambda asked: next(tries)(asked))  # noqa: PLW0108  each call takes the next

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p2", "d1", "d1"]


async def test_a_prefill_worker_that_ends_without_a_handoff_is_replaced() -> None:
    async def nothing(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        return
        yield TokenChunk(())  # type: ignore[unreachable]  # makes it a generator

    fleet = ScriptedWorkers(p1=nothing, p2=hand_off, d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "p2", "d1"]


async def test_a_prefill_worker_lost_in_the_moment_of_the_first_chunk_is_not_missed() -> None:
    arrived = asyncio.Event()

    async def lost_then(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for handoff in hand_off(asked):
            yield handoff
            await arrived.wait()
            raise WorkerLost("gone")

    async def arriving(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(0)  # both are waited for now
        arrived.set()
        async for chunk in answer(asked):
            yield chunk

    fleet = ScriptedWorkers(p1=lost_then, p2=hand_off, d1=arriving)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1"]


async def test_prefill_and_handoff_are_timed_once_each() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=answer)
    began_s = time.perf_counter()

    assert await generate(fleet) == WHOLE
    spent_s = time.perf_counter() - began_s
    for name in ("baton_prefill_seconds", "baton_handoff_seconds"):
        assert fleet.metrics.registry.get_sample_value(f"{name}_count") == 1
        assert 0 < (fleet.metrics.registry.get_sample_value(f"{name}_sum") or 0) < spent_s


async def test_a_prefill_worker_lost_before_the_kv_has_moved_is_replaced_at_once() -> None:
    async def lost_later(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for handoff in hand_off(asked):
            yield handoff
            raise WorkerLost("gone")

    async def waiting(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.handoff is not None and len(fleet.calls) == 2:
            await asyncio.Event().wait()  # for KV that does not come
        async for chunk in answer(asked):
            yield chunk

    fleet = ScriptedWorkers(p1=lost_later, p2=hand_off, d1=waiting)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p2", "d1"]


async def test_a_stream_goes_on_from_another_decode_worker_without_loss_or_repetition() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=failing(WorkerLost("gone"), after=2), d2=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1", "d1", "p1", "d2"]
    resumed = fleet.calls[-1][1]
    assert (resumed.token_ids, resumed.num_generated) == ([1, 2, 10, 11], 2)
    assert 0 < resumed.deadline_s <= 5


async def test_a_stream_that_ends_early_counts_as_a_lost_worker() -> None:
    async def cut(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        yield TokenChunk((10,))

    assert await generate(ScriptedWorkers(d1=cut, d2=answer)) == WHOLE


@pytest.mark.parametrize(
    ("scripts", "raised", "num_calls"),
    [
        ({"p1": hand_off}, NoWorkers, 0),
        ({"d1": failing(WorkerLost("gone"), after=1)}, WorkerLost, 1),
        ({"d1": failing(Overloaded("full"))}, Overloaded, 1),
        ({"p1": failing(InvalidRequest("bad")), "d1": answer}, InvalidRequest, 1),
        ({"p1": hand_off, "d1": failing(DeadlineExceeded("over"))}, DeadlineExceeded, 2),
        ({f"d{i}": failing(WorkerLost("gone")) for i in range(9)}, WorkerLost, 4),
    ],
)
async def test_what_cannot_be_repaired_ends_with_its_name(
    scripts: dict[str, Script], raised: type[BatonError], num_calls: int
) -> None:
    fleet = ScriptedWorkers(**scripts)

    with pytest.raises(raised):
        await generate(fleet)
    assert len(fleet.calls) == num_calls


async def test_the_fourth_worker_may_be_the_one_that_answers() -> None:
    lost = failing(WorkerLost("gone"))

    assert await generate(ScriptedWorkers(d1=lost, d2=lost, d3=lost, d4=answer)) == WHOLE


async def test_only_a_lost_worker_is_avoided_by_others() -> None:
    tries = iter([failing(Overloaded("full")), answer])
    fleet = ScriptedWorkers(d1=lambda asked: next(tries)(asked), d2=failing(WorkerLost("gone")))  # noqa: PLW0108  each call takes the next
    async with generator_over(fleet) as generator:
        with pytest.raises(WorkerLost):
            assert [chunk async for chunk in generator.generate(request())]
        assert [chunk async for chunk in generator.generate(request())]

    assert fleet.asked == ["d1", "d2", "d1"]


async def test_a_full_worker_is_passed_over_for_one_with_room() -> None:
    fleet = ScriptedWorkers(d1=failing(Overloaded("full")), d2=answer)

    assert await generate(fleet) == WHOLE


async def test_a_prefill_worker_that_no_decode_worker_can_take_kv_from_is_left_out() -> None:
    fleet = ScriptedWorkers(p1x=hand_off, d1=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["d1"]


async def test_decode_is_picked_among_those_that_can_take_the_kv() -> None:
    fleet = ScriptedWorkers(p1x=hand_off, d1=failing(HandoffFailed("it cannot")), d2x=answer)

    assert await generate(fleet) == WHOLE
    assert fleet.asked == ["p1x", "d2x"]


async def test_a_lost_worker_is_avoided_by_the_next_requests_too() -> None:
    fleet = ScriptedWorkers(d1=failing(WorkerLost("gone")), d2=answer)
    async with generator_over(fleet) as generator:
        for _ in range(3):
            assert [chunk async for chunk in generator.generate(request())]

    assert fleet.asked == ["d1", "d2", "d2", "d2"]


def test_leaving_closes_the_calls_to_both_workers_in_any_phase() -> None:
    async def silent(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.Event().wait()
        yield TokenChunk(())

    async def leave(fleet: ScriptedWorkers, open_calls: list[str], local: int = 0) -> None:
        with none_abandoned():
            await leave_while_open(fleet, open_calls, local)

    async def leave_while_open(fleet: ScriptedWorkers, open_calls: list[str], local: int) -> None:
        over = generator_over(fleet, local_prefill_tokens=local)
        async with over as generator, aclosing(generator.generate(request())) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            await until(lambda: fleet.open == open_calls)
            first.cancel()
            await asyncio.wait([first])
        assert fleet.open == []

    asyncio.run(leave(ScriptedWorkers(p1=silent, d1=answer), ["p1"]))
    asyncio.run(leave(ScriptedWorkers(p1=hand_off, d1=silent), ["p1", "d1"]))
    asyncio.run(leave(ScriptedWorkers(p1=hand_off, d1=silent), ["d1"], local=50))


def test_closing_half_way_closes_the_call_to_decode() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=answer)

    async def close_half_way(local: int) -> None:
        async with generator_over(fleet, local_prefill_tokens=local) as generator:
            with none_abandoned():
                async with aclosing(generator.generate(request())) as chunks:
                    await anext(chunks)
                    assert fleet.open == ["d1"]
                assert fleet.open == []

    asyncio.run(close_half_way(0))
    asyncio.run(close_half_way(50))


def test_later_attempts_get_what_the_first_left_of_the_time() -> None:
    async def slowly_lost(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(2)  # of the five seconds that the request has
        raise WorkerLost("gone")
        yield TokenChunk(())  # type: ignore[unreachable]  # makes it a generator

    fleet = ScriptedWorkers(d1=slowly_lost, d2=answer)

    assert run_jumping(generate(fleet)) == WHOLE
    assert [asked.deadline_s for _, asked in fleet.calls] == pytest.approx([5, 3])


def test_a_request_whose_time_is_over_is_not_tried_again() -> None:
    async def lost_too_late(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await asyncio.sleep(asked.deadline_s)  # all of its time
        raise WorkerLost("gone")
        yield TokenChunk(())  # type: ignore[unreachable]  # makes it a generator

    fleet = ScriptedWorkers(d1=lost_too_late, d2=answer)

    with pytest.raises(DeadlineExceeded):
        run_jumping(generate(fleet))
    assert fleet.asked == ["d1"]


async def test_the_least_loaded_worker_is_the_one_with_the_fewest_calls_still_open() -> None:
    fleet = ScriptedWorkers(d1=answer, d2=answer)
    async with (
        generator_over(fleet, "least-loaded") as generator,
        aclosing(generator.generate(request())) as open_one,
    ):
        await anext(open_one)
        for _ in range(3):
            assert [chunk async for chunk in generator.generate(request())]

    assert fleet.asked == ["d1", "d2", "d2", "d2"]


async def test_a_prefill_worker_is_free_as_soon_as_decode_has_its_kv() -> None:
    fleet = ScriptedWorkers(p1=hand_off, p2=hand_off, d1=answer)
    async with (
        generator_over(fleet, "least-loaded") as generator,
        aclosing(generator.generate(request())) as decoding,
    ):
        await anext(decoding)
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]

    assert fleet.asked == ["p1", "d1", "p2", "d1", "p1", "d1"]


def prefills(fleet: ScriptedWorkers) -> dict[tuple[str, str], float]:
    """Counted prompts by where they were computed and why."""
    families = [f for f in fleet.metrics.registry.collect() if f.name == "baton_prefills"]
    samples = [s for f in families for s in f.samples if s.name.endswith("_total")]
    return {(s.labels["where"], s.labels["reason"]): s.value for s in samples}


def lacking(num_tokens: int, *, is_busy: bool = False) -> Script:
    """A decode worker that lacks so much of the prompt."""

    async def script(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        limit = asked.local_prefill_tokens
        if asked.handoff is None and limit is not None and (is_busy or num_tokens > limit):
            yield PrefillFirst(num_tokens, is_busy)
            return
        async with aclosing(answer(asked)) as chunks:
            async for chunk in chunks:
                yield chunk

    return script


async def test_a_decode_worker_that_lacks_little_answers_without_prefill() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=lacking(50))

    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert fleet.asked == ["d1"]
    assert prefills(fleet) == {("decode", "cached"): 1}


@pytest.mark.parametrize(("is_busy", "reason"), [(False, "long"), (True, "busy")])
async def test_what_it_lacks_more_is_prefilled_and_handed_to_the_same_worker(
    is_busy: bool, reason: str
) -> None:
    decodes = {name: lacking(51, is_busy=is_busy) for name in ("d1", "d2", "d3")}
    fleet = ScriptedWorkers(p1=hand_off, **decodes)

    async def main() -> None:
        async with generator_over(fleet, local_prefill_tokens=50) as generator:
            for _ in range(2):
                assert [i async for c in generator.generate(request()) for i in c.token_ids] == WHOLE

    await main()
    assert fleet.asked == ["d1", "p1", "d1", "d2", "p1", "d2"]
    assert [call.handoff is not None for _, call in fleet.calls] == [False, False, True] * 2
    assert prefills(fleet) == {("prefill", reason): 2}


async def test_a_handoff_without_its_first_token_is_one_like_others() -> None:
    async def untold(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async with aclosing(hand_off(asked)) as replies:
            async for reply in replies:
                yield msgspec.structs.replace(reply, first_token=NO_TOKEN)

    fleet = ScriptedWorkers(p1=untold, d1=answer)
    async with generator_over(fleet) as generator:
        assert [i async for c in generator.generate(request()) for i in c.token_ids] == WHOLE
    assert fleet.asked == ["p1", "d1"]
    assert fleet.calls[1][1].num_generated == 0


@pytest.mark.parametrize("role", ["decode", "prefill", "first chunk"])
async def test_a_worker_that_sends_unknown_tokens_is_refused_and_the_answer_is_right(role: str) -> None:
    async def strange(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if role == "decode":
            yield TokenChunk((10 + asked.num_generated, NUM_IDS))
            return
        async with aclosing(hand_off(asked)) as replies:
            async for reply in replies:
                assert isinstance(reply, KvHandoff)
                changed: dict[str, Any] = {"first_token": NUM_IDS}
                if role == "first chunk":
                    changed = {"first_chunk": TokenChunk((NUM_IDS,))}
                yield msgspec.structs.replace(reply, **changed)

    genuine = {"d2": answer} if role == "decode" else {"d1": answer, "p2": hand_off}
    fleet = ScriptedWorkers(**genuine, **{"d1" if role == "decode" else "p1": strange})

    async def main() -> Health:
        live = Fleet(fleet, fleet, model_path=DEMO)
        async with live.keep_current():
            await live.synced.wait()
            generator = Generator(fleet, live, "round-robin", fleet.metrics.routing)
            for _ in range(3):
                assert [i async for c in generator.generate(request()) for i in c.token_ids] == WHOLE
            return live.health()

    health = await main()
    name = "d1" if role == "decode" else "p1"
    assert fleet.asked.count(name) == 1
    assert [reason.partition(":")[0] for reason in health.refused] == [name]


async def test_a_short_prompt_joins_decode_only_while_prefill_keeps_others_waiting() -> None:
    released = asyncio.Event()

    async def slow(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        await released.wait()
        async with aclosing(hand_off(asked)) as replies:
            async for reply in replies:
                yield reply

    fleet = ScriptedWorkers(p1=slow, d1=lacking(50))
    async with generator_over(fleet, local_prefill_tokens=50, local_prefill_after_s=0.01) as generator:

        async def answer_of() -> list[int]:
            return [i async for c in generator.generate(request()) for i in c.token_ids]

        first = asyncio.create_task(answer_of())
        await until(lambda: fleet.asked == ["p1"])
        await asyncio.sleep(0.02)  # longer than the limit
        assert await answer_of() == WHOLE
        assert fleet.asked == ["p1", "d1"]
        released.set()
        assert await first == WHOLE
        assert await answer_of() == WHOLE
        assert fleet.asked == ["p1", "d1", "d1", "p1", "d1"]
    assert prefills(fleet) == {("prefill", "free"): 2, ("decode", "cached"): 1}


async def test_without_a_prefill_worker_no_limit_is_set() -> None:
    fleet = ScriptedWorkers(d1=lacking(51))

    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert prefills(fleet) == {("decode", "no_prefill_worker"): 1}
    assert fleet.calls[0][1].local_prefill_tokens is None


async def test_a_decode_worker_lost_while_it_computes_the_prompt_is_replaced() -> None:
    fleet = ScriptedWorkers(p1=hand_off, d1=failing(WorkerLost("gone")), d2=lacking(1))

    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert fleet.asked == ["d1", "d2"]


async def test_a_handoff_that_fails_after_the_question_is_the_prefill_workers_fault() -> None:
    tries = iter([lacking(51), failing(HandoffFailed("expired")), lacking(51), answer])
    fleet = ScriptedWorkers(p1=hand_off, p2=hand_off, d1=lambda asked: next(tries)(asked))  # noqa: PLW0108  each call takes the next

    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert fleet.asked == ["d1", "p1", "d1", "d1", "p2", "d1"]


async def test_a_prefill_worker_that_cannot_hand_over_to_the_one_with_the_cache_is_left_out() -> None:
    fleet = ScriptedWorkers(p1x=hand_off, p2=hand_off, d1=lacking(51), d2x=lacking(51))

    assert await generate(fleet, local_prefill_tokens=50) == WHOLE
    assert fleet.asked == ["d1", "p2", "d1"]


async def test_a_prefill_worker_lost_while_its_kv_is_awaited_is_avoided_by_the_next_requests_too() -> None:
    async def lost_later(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        async for handoff in hand_off(asked):
            yield handoff
            raise WorkerLost("silent")

    async def waiting(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if asked.handoff is not None and fleet.asked[-2] == "p1":
            await asyncio.Event().wait()  # for KV that does not come
        async for chunk in answer(asked):
            yield chunk

    fleet = ScriptedWorkers(p1=lost_later, p2=hand_off, d1=waiting)
    async with generator_over(fleet) as generator:
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]
    assert fleet.asked == ["p1", "d1", "p2", "d1", "p2", "d1"]


async def test_when_no_kv_arrives_decode_prefills_by_itself_and_the_pair_is_left_out() -> None:
    tries = iter([failing(HandoffStalled("nothing came")), answer, answer])
    fleet = ScriptedWorkers(p1=hand_off, p2=hand_off, d1=lambda asked: next(tries)(asked))  # noqa: PLW0108  each call takes the next
    async with generator_over(fleet) as generator:
        for _ in range(2):
            assert [chunk async for chunk in generator.generate(request())]
    assert fleet.asked == ["p1", "d1", "d1", "p2", "d1"]
    assert prefills(fleet) == {("prefill", "always"): 2, ("decode", "stalled"): 1}
