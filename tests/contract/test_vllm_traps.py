"""The vllm engine against known traps of vLLM and NIXL."""

import asyncio
import re
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from baton.errors import HandoffFailed, InvalidRequest, WorkerLost
from baton.messages import KvHandoff, after_handoff
from tests.engine_calls import ask, handed_over, left_handoff, next_handoff, tokens, until_idle
from tests.tiny_gpt_oss import CONTEXT_LENGTH
from tests.vllm_engine import core, new_engine, started
from tests.waiting import FAILOVER_S, PATIENCE_S, scaled, until


def lost(handoff: KvHandoff) -> KvHandoff:
    """A handoff whose worker has died."""
    return msgspec.structs.replace(
        handoff, engine_state=re.sub(rb"127\.0\.0\.1", b"127.0.0.9", handoff.engine_state)
    )


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0, "is_seeded": True}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}],
    ids=lambda options: next(iter(options)),
)
async def test_decode_samples_the_first_token_itself_where_it_would_show(
    checkpoint: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # its seeds have no positions
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        async with handed_over(prefill, ask(**options)) as handoff:
            assert handoff.first_chunk is None
            other = msgspec.structs.replace(handoff, first_token=handoff.first_token ^ 1)
            answer = await tokens(decode.decode(ask(handoff=other, **options)))
        assert answer == await tokens(decode.decode(ask(**options)))
        assert decode.stats().kv_moved_bytes > 0


@pytest.mark.parametrize(
    "options", [{}, {"is_seeded": True}, {"temperature": 1.0}, {"logprobs": 2}, {"min_tokens": 3}], ids=str
)
async def test_decode_goes_on_after_prefills_first_token(checkpoint: Path, options: dict[str, Any]) -> None:
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        async with handed_over(prefill, ask(**options)) as handoff:
            first = handoff.first_chunk
            assert first is not None
            assert first.token_ids == (handoff.first_token,)
            assert first.finish_reason is None
            assert len(first.logprobs or ()) == ("logprobs" in options)
            rest = [chunk async for chunk in decode.decode(after_handoff(ask(**options), handoff))]
        assert decode.stats().kv_moved_bytes > 0
        assert rest[-1].usage is not None
        assert (rest[-1].usage.num_prompt_tokens, rest[-1].usage.num_completion_tokens) == (40, 12)
        if "temperature" not in options:
            alone = await tokens(decode.decode(ask(**options)))
            assert [*first.token_ids, *(token for chunk in rest for token in chunk.token_ids)] == alone


@pytest.mark.parametrize("num_generated", [0, 5])
async def test_seeded_answers_go_on_exactly(checkpoint: Path, num_generated: int) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "is_seeded": True}
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        whole = await tokens(decode.decode(ask(**options)))
        so_far = ask().token_ids + whole[:num_generated]
        later = ask(so_far, num_generated=num_generated, **options)
        assert await tokens(decode.decode(later)) == whole[num_generated:]
        async with handed_over(prefill, later) as handoff:
            assert handoff.first_chunk is not None
            rest = await tokens(decode.decode(after_handoff(later, handoff)))
        assert [*handoff.first_chunk.token_ids, *rest] == whole[num_generated:]


async def test_a_prefill_that_is_closed_before_its_handoff_ends_in_the_core_and_leaves_no_pin(
    checkpoint: Path,
) -> None:
    async with started(checkpoint, max_num_batched_tokens=8) as engine:
        prefilling = asyncio.create_task(next_handoff(engine.prefill(ask(400))))
        await until(lambda: engine.stats().num_running == 1)
        prefilling.cancel()
        await asyncio.wait([prefilling])
        assert prefilling.cancelled()
        await until(lambda: not core(engine)._jobs)  # noqa: SLF001  tests only
        assert not core(engine)._pins  # noqa: SLF001  tests only


@pytest.mark.parametrize("config", [{}, {"disable_hybrid_kv_cache_manager": True}], ids=["hybrid", "plain"])
async def test_a_source_that_is_gone_fails_the_handoff_and_no_more(
    checkpoint: Path, config: dict[str, bool]
) -> None:
    async with started(checkpoint) as prefill, started(checkpoint, "decode", **config) as decode:
        handoff = lost(await left_handoff(prefill, ask()))
        with pytest.raises(HandoffFailed, match="its source is gone"):
            await tokens(decode.decode(after_handoff(ask(), handoff)))
        assert await tokens(decode.decode(ask())) == await tokens(decode.decode(ask()))


async def test_kv_that_was_given_back_is_garbage_which_the_double_dies_of(checkpoint: Path) -> None:
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        handoff = await left_handoff(prefill, ask())
        await until_idle(prefill)
        with pytest.raises(WorkerLost):
            await tokens(decode.decode(after_handoff(ask(), handoff)))


async def test_what_a_failed_pull_left_in_the_cache_is_never_found(checkpoint: Path) -> None:
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        handoff = lost(await left_handoff(prefill, ask()))
        salted = ask(cache_salt="own")
        for request in (ask(), salted):
            with pytest.raises(HandoffFailed):
                await tokens(decode.decode(after_handoff(request, handoff)))
            assert decode.num_lacking_tokens(request) == len(request.token_ids)
            # The double would die of it.
            assert len(await tokens(decode.decode(request))) == 12


async def test_the_last_token_of_an_answer_has_no_kv_yet(checkpoint: Path) -> None:
    async with started(checkpoint, "decode") as decode:
        for num_tokens, num_held in ((116, 64), (117, 128)):  # 12 more make 128 and 129, blocks have 64
            answer = await tokens(decode.decode(ask(num_tokens)))
            again = ask([*ask(num_tokens).token_ids, *answer, 1])
            assert decode.num_lacking_tokens(again) == num_tokens + 13 - num_held


async def test_a_prefill_that_is_left_before_its_output_came_leaves_no_pin(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        leaving = asyncio.create_task(next_handoff(engine.prefill(ask())))
        await asyncio.sleep(0)  # now vLLM has it
        while not core(engine)._pins:  # noqa: SLF001  this loop stands still: the output does not get here
            time.sleep(0.001)  # noqa: ASYNC251  the loop stands still
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: not core(engine)._pins)  # noqa: SLF001  the double is ours


async def test_a_first_token_that_ends_the_answer_is_pinned_by_vllm_and_given_back(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        (first,) = await tokens(engine.decode(ask(max_tokens=1)))
        began = time.monotonic()
        async with aclosing(engine.prefill(ask(stop_token_ids=(first,)))) as replies:
            await anext(replies)
            assert core(engine)._pins  # noqa: SLF001  the double is ours
        await until_idle(engine)
        assert time.monotonic() - began < FAILOVER_S


async def test_a_crowd_that_leaves_at_any_time_leaves_no_pin(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        crowd = [asyncio.create_task(next_handoff(engine.prefill(ask(30 + i)))) for i in range(24)]
        for i, leaving in enumerate(crowd):
            await asyncio.sleep(0.003 * (i % 4))  # some at once, some a few steps later
            leaving.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        assert not core(engine)._is_dead  # noqa: SLF001  the double is ours


async def test_pinned_requests_take_no_place_in_the_queue(checkpoint: Path) -> None:
    async with started(checkpoint, max_num_seqs=1, max_queue_size=1) as engine, AsyncExitStack() as pins:
        for _ in range(3):
            call = await pins.enter_async_context(aclosing(engine.prefill(ask())))
            assert isinstance(await anext(call), KvHandoff)


async def test_what_vllm_refuses_is_the_clients_fault(checkpoint: Path) -> None:
    async with started(checkpoint, "agg") as engine:
        for request in (ask(temperature=2.5), ask(logprobs=21)):
            with pytest.raises(InvalidRequest, match="vLLM refuses"):
                await tokens(engine.decode(request))
        assert len(await tokens(engine.decode(ask(CONTEXT_LENGTH - 3)))) == 3


async def test_a_dead_core_ends_every_request_and_takes_no_other(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOUBLE_VLLM_DIES_AFTER", "60")
    async with started(checkpoint, "agg") as engine:
        answers = [tokens(engine.decode(ask(max_tokens=100))) for _ in range(2)]
        for outcome in await asyncio.gather(*answers, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
        async with asyncio.timeout(PATIENCE_S):
            assert "engine core died" in await engine.failed()
        with pytest.raises(WorkerLost, match="engine core died"):
            await tokens(engine.decode(ask()))


@pytest.mark.parametrize("dies", [True, False])
async def test_a_vllm_that_dies_or_stops_ends_what_is_pinned_and_is_asked_no_more(
    dies: bool, checkpoint: Path
) -> None:
    engine = new_engine(checkpoint)
    await engine.start()
    replies = engine.prefill(ask())
    await next_handoff(replies)
    if dies:  # which is noticed without a request
        core(engine).die()
        async with asyncio.timeout(PATIENCE_S):
            await engine.failed()
    else:
        await engine.stop()
    with pytest.raises(WorkerLost):
        await anext(replies)
    assert "release-kv" not in {task.get_name() for task in asyncio.all_tasks()}
    assert engine.stats().kv_pinned_blocks == 0
    await engine.stop()


async def test_a_worker_that_hands_nothing_over_says_so(checkpoint: Path) -> None:
    async with started(checkpoint) as prefill, started(checkpoint, "agg") as agg:
        handoff = await left_handoff(prefill, ask())
        with pytest.raises(HandoffFailed, match="--disaggregation-mode agg"):
            await tokens(agg.decode(ask(handoff=handoff)))
        with pytest.raises(HandoffFailed, match="--disaggregation-mode agg"):
            await anext(agg.prefill(ask()))


async def test_a_priority_reaches_vllm_and_among_equals_short_prompts_overtake_long_ones(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []
    generate = AsyncLLM.generate

    def spying(llm: AsyncLLM, *args: Any, priority: int = 0, **options: Any) -> Any:
        assert llm.vllm_config.scheduler_config.policy == "priority"
        places.append(priority)
        return generate(llm, *args, priority=priority, **options)

    async def main() -> None:
        async with started(checkpoint, "decode") as engine:
            monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.generate", spying)
            sooner, later = (ask(priority=p) for p in (-3, 1))
            for request in (later, ask(400), ask(40), sooner, ask(400)):
                await tokens(engine.decode(request))

    await main()
    later, long, short, sooner, known = places
    assert (min(places), max(places)) == (sooner, later)
    assert 0 < short - long + 180 < scaled(10_000)  # 0.18 s for 360 tokens less, and the time between
    assert 0 < known - long + 192 < scaled(10_000)  # its first 384 tokens were cached
