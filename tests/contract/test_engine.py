"""The Engine contract, for each engine that runs here, with real KV transfers between two."""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, NotReady, Overloaded, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, Role, TokenChunk, TokenLogprob, Usage, after_handoff
from tests.engine_calls import (
    ask,
    chunks,
    counts,
    handed_over,
    left_handoff,
    next_handoff,
    running,
    until_idle,
)
from tests.engines import ENGINES, Build, Limits
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt
from tests.waiting import PATIENCE_S, until
from workers.engine import Engine
from workers.engines.library.engine import LibraryEngine
from workers.engines.trtllm.adapter import TrtllmAdapter

GREEDY: dict[str, Any] = {"temperature": 0.0}
LOGPROB_TOLERANCE = 1e-4
LARGEST_BLOCK = 64  # tokens at the end of a sequence that may not be found again
SEEDED: dict[str, Any] = {"temperature": 1.5, "seed": 7, "top_p": 0.95, "frequency_penalty": 0.3}


def _engines(*without: str) -> Any:
    """A fixture that makes engines of one kind; a line in ENGINES adds another one to the suite."""

    @pytest.fixture(params=[name for name in ENGINES if name not in without])
    def build(request: pytest.FixtureRequest, checkpoint: Path) -> Build:
        return functools.partial(ENGINES[request.param], checkpoint)

    return build


build = _engines()
# Without the mocker, whose tokens have no meaning: no stop tokens, log probabilities or vocabulary.
build_sampling = _engines("mocker")
# TensorRT-LLM cannot release a pin: it expires.
build_releasing = _engines("trtllm")
# A late pull does not fail: it is not too late (trtllm), or it reads the memory's new contents (vllm).
build_guarding = _engines("trtllm", "vllm")


def started(
    build: Build, *roles: Role, limits: Limits | None = None
) -> AbstractAsyncContextManager[list[Engine]]:
    return running(*(build(role, limits or Limits()) for role in roles))


def is_positional(engine: Engine) -> bool:
    """Whether it resumes a sampled answer exactly."""
    return not isinstance(engine, LibraryEngine) or getattr(engine.adapter, "is_positional", False)


def is_trtllm(engine: Engine) -> bool:
    return isinstance(engine, LibraryEngine) and isinstance(engine.adapter, TrtllmAdapter)


def tokens(answer: list[TokenChunk]) -> list[int]:
    """The token ids; checks finish reasons and the prompt's usage."""
    assert [chunk.finish_reason is not None for chunk in answer] == [False] * (len(answer) - 1) + [True]
    first, last = answer[0].usage, answer[-1].usage
    assert first is not None
    assert last is not None
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (
        last.num_prompt_tokens,
        last.num_cached_tokens,
    )
    assert sum(chunk.usage is not None for chunk in answer) <= 3  # prefill's, decode's first and last
    return [token_id for chunk in answer for token_id in chunk.token_ids]


def counted(last: TokenChunk) -> tuple[int, int]:
    """(tokens of the prompt, tokens of the answer); any part of the prompt may have been cached."""
    assert last.usage is not None
    assert 0 <= last.usage.num_cached_tokens <= last.usage.num_prompt_tokens
    return last.usage.num_prompt_tokens, last.usage.num_completion_tokens


async def alone(engine: Engine, request: GenerateRequest) -> list[int]:
    return tokens(await chunks(engine.decode(request)))


async def disaggregated(prefill: Engine, decode: Engine, request: GenerateRequest) -> list[TokenChunk]:
    """Prefill on one engine, decode on the other; the prefill generator must end when the KV has moved, if
    the engine notices it."""
    async with aclosing(prefill.prefill(request)) as replies:
        handoff = await next_handoff(replies)
        answer = [handoff.first_chunk] if handoff.first_chunk is not None else []
        answer += await chunks(decode.decode(after_handoff(request, handoff)))
        if not isinstance(prefill, LibraryEngine):
            async with asyncio.timeout(PATIENCE_S):
                assert await anext(replies, None) is None
    return answer


async def cancelled(work: Coroutine[Any, Any, object], once: Callable[[], bool]) -> None:
    """Start `work`, wait for `once`, cancel it."""
    task = asyncio.create_task(work)
    await until(once)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()


async def expect(error: type[Exception], match: str | None, answer: AsyncGenerator[Any, None]) -> None:
    """The answer ends with this error, after any chunks."""
    with pytest.raises(error, match=match):
        await chunks(answer)


async def test_start_tells_what_the_engine_is_and_stop_ends_it(build: Build) -> None:
    engine = build(Role.DECODE, Limits())
    await expect(NotReady, None, engine.decode(ask(5)))
    info = await engine.start()
    assert info.engine
    assert info.engine_version
    assert info.context_length == CONTEXT_LENGTH
    await alone(engine, ask(5))
    await engine.stop()
    await engine.stop()
    await expect(NotReady, None, engine.decode(ask(5)))


async def test_an_answer_ends_at_max_tokens_with_its_usage(build: Build) -> None:
    async with started(build, Role.DECODE) as (engine,):
        answer = await chunks(engine.decode(ask(20)))
        assert len(tokens(answer)) == 12
        assert answer[-1].finish_reason == "length"
        assert answer[-1].usage is not None
        assert counts(answer[-1]) in {Usage(20, 0, 12), Usage(20, 0, 12, 0)}
        stats = engine.stats()
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (20, 12)


async def test_a_conversation_lacks_only_what_is_new(build: Build) -> None:
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        first = ask(150)
        assert decode.num_lacking_tokens(first) == 150
        handed_over = await disaggregated(prefill, decode, first)
        first_answer, usage = tokens(handed_over), handed_over[-1].usage
        if not isinstance(decode, LibraryEngine):
            assert usage is not None
            assert usage.num_moved_bytes == decode.stats().kv_moved_bytes > 0
        assert prefill.num_lacking_tokens(first) <= LARGEST_BLOCK
        second = ask([*prompt(150), *first_answer, *prompt(100, seed=2)])
        assert 100 < decode.num_lacking_tokens(second) <= 100 + LARGEST_BLOCK
        other = msgspec.structs.replace(second, cache_salt="other")
        assert decode.num_lacking_tokens(other) == 150 + 12 + 100
        expected = await alone(prefill, second)
        before = decode.stats()
        (*_, last) = answer = await chunks(decode.decode(second))
        assert tokens(answer) == expected
        if not is_trtllm(decode):  # its double caches nothing
            computed = decode.stats().num_prompt_tokens - before.num_prompt_tokens
            assert last.usage is not None
            assert last.usage.num_cached_tokens == 150 + 12 + 100 - computed
            assert computed <= 100 + LARGEST_BLOCK


async def test_a_stop_token_ends_the_answer_and_is_its_last(build_sampling: Build) -> None:
    async with started(build_sampling, Role.DECODE) as (engine,):
        whole = await alone(engine, ask(20))
        stop = whole[3]
        end = whole.index(stop) + 1
        answer = await chunks(engine.decode(ask(20, stop_token_ids=(stop,))))
        assert tokens(answer) == whole[:end]
        assert (answer[-1].finish_reason, counted(answer[-1])) == ("stop", (20, end))
        ignoring = ask(20, stop_token_ids=(stop,), ignore_eos=True)
        assert await alone(engine, ignoring) == whole
        later = await alone(engine, ask(20, stop_token_ids=(stop,), min_tokens=6))
        assert len(later) > 6
        assert stop not in later[:6]


@pytest.mark.parametrize("num_tokens", [1, 17, 150])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_disaggregated_equals_aggregated(
    build_sampling: Build, num_tokens: int, sampling: dict[str, Any]
) -> None:
    async with started(build_sampling, Role.PREFILL, Role.DECODE) as (prefill, decode):
        request = ask(prompt(num_tokens), **sampling, logprobs=2)
        salted = msgspec.structs.replace(request, cache_salt="own")  # so that the whole KV has to move
        expected = await chunks(decode.decode(salted))
        answer = await disaggregated(prefill, decode, request)
        assert tokens(answer) == tokens(expected)
        assert counted(answer[-1]) == counted(expected[-1])
        for got, want in zip(logprobs(answer), logprobs(expected), strict=True):
            assert got.token_id == want.token_id
            assert got.logprob == pytest.approx(want.logprob, abs=LOGPROB_TOLERANCE)
            assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in want.top]
        assert (prefill.stats().num_handoffs, decode.stats().num_handoffs) == (1, 1)
        if not isinstance(prefill, LibraryEngine):
            assert prefill.stats().kv_moved_bytes == decode.stats().kv_moved_bytes > 0


def logprobs(answer: list[TokenChunk]) -> list[TokenLogprob]:
    return [entry for chunk in answer for entry in chunk.logprobs or ()]


async def test_the_prompts_log_probabilities_are_those_that_its_tokens_had_as_an_answer(
    build_sampling: Build,
) -> None:
    async with started(build_sampling, Role.PREFILL, Role.DECODE) as (prefill, decode):
        if is_trtllm(prefill):
            refused = ask(5, prompt_logprobs=0, max_tokens=1)
            await expect(InvalidRequest, None, prefill.prefill(refused))
            return
        answer = await chunks(decode.decode(ask(40, logprobs=2)))
        given = ask(prompt(40) + tokens(answer), prompt_logprobs=2, max_tokens=1)
        for engine_calls in (prefill.prefill, decode.decode):
            [scored] = await chunks(engine_calls(given))
            assert isinstance(scored, TokenChunk)
            entries = scored.prompt_logprobs or ()
            assert [entry.token_id for entry in entries] == given.token_ids[1:]
            for got, want in zip(entries[-len(tokens(answer)) :], logprobs(answer), strict=True):
                assert got.logprob == pytest.approx(want.logprob, abs=LOGPROB_TOLERANCE)
                assert [token_id for token_id, _ in got.top] == [token_id for token_id, _ in want.top]


async def test_the_prompts_log_probabilities_need_an_answer_of_one_token(build: Build) -> None:
    async with started(build, Role.DECODE) as (engine,):
        several = ask(5, prompt_logprobs=0, max_tokens=2)
        await expect(InvalidRequest, None, engine.decode(several))


async def test_a_mixed_crowd_gets_what_each_gets_alone(build: Build) -> None:
    requests = [
        ask(prompt(length, seed=length), max_tokens=4 + length % 9, **sampling)
        for length in (1, 3, 16, 40, 90, 200)
        for sampling in (GREEDY, SEEDED)
    ]
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        expected = [await alone(decode, request) for request in requests]
        crowd = asyncio.gather(*[alone(decode, request) for request in requests])
        handed = asyncio.gather(*[disaggregated(prefill, decode, request) for request in requests])
        assert await crowd == expected
        assert [tokens(answer) for answer in await handed] == expected


async def test_a_first_token_that_ends_the_answer_needs_no_handoff(build_sampling: Build) -> None:
    async with started(build_sampling, Role.PREFILL, Role.DECODE) as (prefill, decode):
        (first,) = await alone(decode, ask(20, max_tokens=1))
        for options in ({"max_tokens": 1}, {"stop_token_ids": (first + 1, first)}):
            (reply,) = await chunks(prefill.prefill(ask(20, **options)))
            assert isinstance(reply, TokenChunk)
            assert tokens([reply]) == [first]
            assert counted(reply) == (20, 1)
        assert prefill.stats().num_handoffs == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_generated", [1, 5, 11])
async def test_a_resumed_answer_goes_on_exactly(
    build: Build, num_generated: int, sampling: dict[str, Any]
) -> None:
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        if not is_positional(decode) and sampling is SEEDED:
            pytest.skip("its sampling is not positional")
        whole = await alone(decode, ask(30, **sampling))
        so_far = prompt(30) + whole[:num_generated]
        rest = ask(so_far, num_generated=num_generated, **sampling)
        answer = await chunks(decode.decode(rest))
        assert whole[:num_generated] + tokens(answer) == whole
        assert counted(answer[-1]) == (30, 12)
        if num_generated < 11:  # otherwise the first token would end it
            answer = await disaggregated(prefill, decode, rest)
            assert whole[:num_generated] + tokens(answer) == whole


async def test_closing_while_it_waits_or_prefills_or_decodes_frees_everything(build: Build) -> None:
    async with started(build, Role.DECODE, limits=Limits(max_batch_size=1)) as (engine,):
        long = ask(400, max_tokens=100)
        prefilling = chunks(engine.decode(long))
        await cancelled(prefilling, lambda: engine.stats().num_running == 1)
        await until_idle(engine)
        async with aclosing(engine.decode(long)) as answer:
            await anext(answer)
            assert engine.stats().kv_used_blocks > 0
            await cancelled(chunks(engine.decode(long)), lambda: engine.stats().num_waiting == 1)
            await until(lambda: engine.stats().num_waiting == 0)
        await until_idle(engine)
        assert engine.stats().num_generated_tokens < 100


async def test_closing_a_prefill_before_its_handoff_frees_everything(build: Build) -> None:
    async with started(build, Role.PREFILL, limits=Limits(ttl_s=1)) as (engine,):
        work = next_handoff(engine.prefill(ask(400)))
        await cancelled(work, lambda: engine.stats().num_running == 1)
        await until_idle(engine)


async def test_a_handoff_lives_no_longer_than_its_request(build: Build) -> None:
    async with started(build, Role.PREFILL) as (engine,):
        handoff = await left_handoff(engine, ask(40, deadline_s=20.0))  # its KV is kept for 30 s
        assert handoff.ttl_s <= 20.0


async def test_closing_a_prefill_after_its_handoff_frees_the_pin(build_releasing: Build) -> None:
    async with started(build_releasing, Role.PREFILL) as (engine,):
        async with handed_over(engine, ask(40)):
            assert engine.stats().kv_pinned_blocks > 0
        assert engine.stats().kv_pinned_blocks == 0
        await until_idle(engine)


async def test_a_pull_of_kv_that_was_given_back_fails(build_guarding: Build) -> None:
    async with started(build_guarding, Role.PREFILL, Role.DECODE) as (prefill, decode):
        handoff = await left_handoff(prefill, ask(40))
        await expect(HandoffFailed, None, decode.decode(ask(40, handoff=handoff)))


async def test_a_handoff_that_nobody_pulls_expires(build: Build) -> None:
    async with started(build, Role.PREFILL, limits=Limits(ttl_s=0.1)) as (engine,):
        replies = engine.prefill(ask(40))
        handoff = await next_handoff(replies)
        assert handoff.ttl_s <= 0.1
        with pytest.raises(HandoffFailed):
            await anext(replies)
        assert engine.stats().num_handoffs_expired == 1


async def test_a_handoff_of_another_prompt_or_engine_is_refused(build: Build) -> None:
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        async with handed_over(prefill, ask(40)) as handoff:
            await expect(HandoffFailed, None, decode.decode(ask(43, handoff=handoff)))
        foreign = msgspec.structs.replace(handoff, engine_state=b"\x01not ours")
        await expect(HandoffFailed, None, decode.decode(after_handoff(ask(40), foreign)))


async def test_the_deadline_ends_what_waits_and_what_runs(build: Build) -> None:
    async with started(build, Role.DECODE, limits=Limits(max_batch_size=1)) as (engine,):
        slow = ask(10, max_tokens=CONTEXT_LENGTH - 10, deadline_s=0.15)
        await asyncio.gather(*[expect(DeadlineExceeded, None, engine.decode(slow)) for _ in range(2)])
        await until_idle(engine)


async def test_what_cannot_fit_is_refused_with_both_numbers(build: Build) -> None:
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        too_long = ask(prompt(CONTEXT_LENGTH))
        for answer in (prefill.prefill(too_long), decode.decode(too_long)):
            await expect(InvalidRequest, f"{CONTEXT_LENGTH} tokens.*context.*{CONTEXT_LENGTH}", answer)
        full = await chunks(decode.decode(ask(prompt(CONTEXT_LENGTH - 3))))
        assert (len(tokens(full)), full[-1].finish_reason) == (3, "length")


async def test_a_token_that_the_model_does_not_have_harms_nobody(build_sampling: Build) -> None:
    async with started(build_sampling, Role.DECODE) as (engine,):
        for token_ids in ([1, 10_000_000], [1, -1]):
            await expect(InvalidRequest, str(token_ids[1]), engine.decode(ask(token_ids)))
        await expect(InvalidRequest, "prompt is empty", engine.decode(ask([])))
        await alone(engine, ask(5))


async def test_a_full_queue_says_when_to_come_back(build: Build) -> None:
    limits = Limits(max_batch_size=1, max_queue_size=1)
    async with started(build, Role.DECODE, limits=limits) as (engine,):
        crowd = [asyncio.create_task(alone(engine, ask(10, max_tokens=60))) for _ in range(2)]
        await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
        with pytest.raises(Overloaded) as caught:
            await alone(engine, ask(10))
        assert caught.value.retry_after_s is not None
        await asyncio.gather(*crowd)


async def test_stop_ends_what_still_runs(build: Build) -> None:
    engine = build(Role.DECODE, Limits())
    await engine.start()
    running = asyncio.create_task(expect(WorkerLost, None, engine.decode(ask(10, max_tokens=400))))
    await until(lambda: engine.stats().num_generated_tokens > 2)
    await engine.stop()
    await running


def durations(spent: Usage | KvHandoff) -> list[float]:
    """Of the queue, the computation and the KV; none is negative."""
    found = [spent.waited_s, spent.computed_s, spent.moved_s if isinstance(spent, Usage) else 0.0]
    assert min(found) >= 0
    return found


async def test_what_an_engine_spends_its_time_on_is_at_most_what_its_caller_waits(build: Build) -> None:
    async with started(build, Role.PREFILL, Role.DECODE) as (prefill, decode):
        began_s = time.perf_counter()
        async with handed_over(prefill, ask(prompt(100, seed=3))) as handoff:
            assert 0 < handoff.computed_s <= sum(durations(handoff)) <= time.perf_counter() - began_s
            for request in (after_handoff(ask(prompt(100, seed=3)), handoff), ask(prompt(90, seed=4))):
                began_s = time.perf_counter()
                async with aclosing(decode.decode(request)) as answer:
                    first = await anext(answer)
                    waited_s = time.perf_counter() - began_s
                    *_, last = [chunk async for chunk in answer]
                assert first.usage is not None
                assert last.usage is not None
                assert durations(first.usage) == durations(last.usage)
                assert sum(durations(first.usage)) <= waited_s
                assert (first.usage.moved_s > 0, first.usage.computed_s > 0) == (
                    request.handoff is not None, request.handoff is None,
                )  # fmt: skip


async def test_who_waits_for_a_place_in_the_batch_has_waited(build: Build) -> None:
    async with started(build, Role.DECODE, limits=Limits(max_batch_size=1)) as (engine,):
        async with aclosing(engine.decode(ask(5, max_tokens=100))) as running:
            await anext(running)
            waiting = asyncio.create_task(chunks(engine.decode(ask(prompt(6, seed=5)))))
            assert len([chunk async for chunk in running]) > 1
            answer = await waiting
        assert answer[0].usage is not None
        assert answer[0].usage.waited_s > answer[0].usage.computed_s
