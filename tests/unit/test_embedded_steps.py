"""The embedded engine's step loop over a scripted model: what is delivered, counted and ended."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from baton.errors import DeadlineExceeded, InvalidRequest, Overloaded, WorkerLost
from baton.messages import Sampling, TokenChunk, TokenLogprob, Usage
from tests.clock import jumping
from tests.engine_calls import counts, untimed
from tests.guided import ScriptedMatcher
from tests.planes import a_request
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Scheduler, Sequence, Work
from workers.engines.embedded.steps import Call, StepLoop

REQUEST = msgspec.structs.replace(a_request(), deadline_s=PATIENCE_S)
LOGPROB = TokenLogprob(7, -0.5)


class Model:
    """Samples token 7 each time, once `may_step` is set."""

    def __init__(self) -> None:
        self.steps: list[list[Sequence]] = []
        self.may_step = threading.Event()
        self.may_step.set()
        self.loses_tokens = False
        self.logprob: TokenLogprob | None = None

    def step(self, work: list[Work]) -> list[list[Sampled]]:
        """See Runner."""
        self.steps.append([each.sequence for each in work])
        self.may_step.wait(PATIENCE_S)
        return [] if self.loses_tokens else [[Sampled(7, self.logprob)] if w.samples else [] for w in work]


def sequence(num_tokens: int, max_tokens: int = 3, *, pulls_kv: bool = False) -> Sequence:
    return Sequence(
        token_ids=list(range(num_tokens)),
        num_prompt=num_tokens,
        sampling=Sampling(max_tokens=max_tokens, seed=0),
        num_reserved=num_tokens + max_tokens,
        pulls_kv=pulls_kv,
    )


@contextlib.asynccontextmanager
async def running(
    model: Model, *, num_blocks: int = 100, max_calls: int = 9
) -> AsyncGenerator[StepLoop, None]:
    scheduler = Scheduler(
        num_blocks=num_blocks,
        tokens_per_block=4,
        context_length=64,
        max_batch_size=4,
        max_num_tokens=16,
    )
    runner: Any = model
    with ThreadPoolExecutor(1) as thread:
        steps = StepLoop(runner, thread, scheduler, max_calls)
        steps.start()
        try:
            yield steps
        finally:
            model.may_step.set()
            steps.stop(DeadlineExceeded())


async def chunks(call: Call) -> list[TokenChunk]:
    received = []
    async with asyncio.timeout(PATIENCE_S):
        while (chunk := await call.next_chunk()) is not None:
            received.append(chunk)
    return received


async def forever() -> None:
    await asyncio.Event().wait()


async def test_an_answer_comes_token_by_token_and_its_end_has_the_counts() -> None:
    model = Model()
    async with running(model) as steps:
        assert (steps.num_prompt_tokens, steps.num_generated_tokens) == (0, 0)
        plain = await chunks(steps.open(REQUEST, sequence(20)))
        assert (steps.num_prompt_tokens, steps.num_generated_tokens) == (20, 3)
        model.logprob = LOGPROB
        scored = sequence(2, 2)
        scored.prompt_logprobs.append(LOGPROB)
        assert [untimed(chunk) for chunk in await chunks(steps.open(REQUEST, scored))] == [
            TokenChunk((7,), None, Usage(2, 0, 1, 0), (LOGPROB,), None),
            TokenChunk((7,), "length", Usage(2, 0, 2, 0), (LOGPROB,), (LOGPROB,)),
        ]
    assert [untimed(chunk) for chunk in plain] == [
        TokenChunk((7,), None, Usage(20, 0, 1, 0), None, None),
        TokenChunk((7,), None, None, None, None),
        TokenChunk((7,), "length", Usage(20, 0, 3, 0), None, None),
    ]


async def test_of_a_resumed_answer_no_more_of_the_prompt_was_cached_than_there_is() -> None:
    resumed = sequence(9, pulls_kv=True)
    resumed.num_prompt = 7
    async with running(Model()) as steps:
        call = steps.open(REQUEST, resumed)
        await call.admitted.wait()
        resumed.num_cached = 8
        steps.resume(call, Sampled(7))
        last = await call.next_chunk()
        assert last is not None
        assert counts(last) == Usage(7, 7, 3, 0)


@jumping
async def test_a_deadline_after_the_end_changes_nothing() -> None:
    async with running(Model()) as steps:
        call = steps.open(msgspec.structs.replace(REQUEST, deadline_s=5), sequence(4))
        await until(lambda: call.outbox.qsize() == 4)
        await asyncio.sleep(6)  # the clock jumps
        assert len(await chunks(call)) == 3
        assert call.outbox.empty()


async def test_running_and_waiting_calls_count_towards_the_limit() -> None:
    async with running(Model(), num_blocks=4, max_calls=2) as steps:
        opened = [steps.open(REQUEST, sequence(10, pulls_kv=True)) for _ in range(2)]
        await opened[0].admitted.wait()
        assert (steps.scheduler.num_running, steps.scheduler.num_waiting) == (1, 1)
        with pytest.raises(Overloaded, match="2 requests are running or waiting; at most 2 are allowed"):
            steps.open(REQUEST, sequence(1))


async def test_a_call_that_is_closed_leaves_nothing_and_lets_the_next_one_in() -> None:
    async with running(Model(), num_blocks=4) as steps:
        first, second = sequence(10, pulls_kv=True), sequence(10)
        pulling = steps.open(REQUEST, first)
        pulling.transfer = asyncio.create_task(forever())
        waiting = steps.open(REQUEST, second)
        await pulling.admitted.wait()
        await until(lambda: not steps._wake.is_set())  # noqa: SLF001  the loop has nothing to do
        steps.close(pulling)
        assert len(await chunks(waiting)) == 3
        await asyncio.wait([pulling.transfer])
        assert pulling.transfer.cancelled()
        assert pulling.deadline.cancelled()
        steps.stop(DeadlineExceeded())
        assert pulling.outbox.empty()


@pytest.mark.parametrize("end", [StepLoop.close, lambda steps, call: steps.fail(call, DeadlineExceeded())])
async def test_a_call_that_ends_during_a_step_does_not_hurt_the_others(
    end: Callable[[StepLoop, Call], None],
) -> None:
    model = Model()
    async with running(model) as steps:
        model.may_step.clear()
        gone, stays = steps.open(REQUEST, sequence(4)), steps.open(REQUEST, sequence(4))
        await until(lambda: len(model.steps) == 1)
        end(steps, gone)
        model.may_step.set()
        assert len(await chunks(stays)) == 3
        assert steps.num_generated_tokens == 3
        assert not steps.broke.is_set()


async def test_a_step_that_loses_tokens_breaks_the_engine_and_is_reported() -> None:
    model = Model()
    model.loses_tokens = True
    async with running(model) as steps:
        with pytest.raises(WorkerLost, match="ValueError: zip"):
            await chunks(steps.open(REQUEST, sequence(4)))
        assert steps.broke.is_set()
        with pytest.raises(WorkerLost, match="ValueError: zip"):
            steps.open(REQUEST, sequence(4))


@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("pulls_kv", [False, True])
@jumping
async def test_each_token_of_a_guided_answer_has_a_mask_of_its_own(late_s: float, pulls_kv: bool) -> None:
    guided = sequence(4, pulls_kv=pulls_kv)
    guided.matcher = matcher = ScriptedMatcher(late_s)
    async with running(Model()) as steps:
        call = steps.open(REQUEST, guided)
        if pulls_kv:
            await call.admitted.wait()
            steps.resume(call, Sampled(7, None))
        assert len(await chunks(call)) == 3
        steps.close(call)
    assert matcher.followed == [[], [7], [7, 7]][pulls_kv:]


@jumping
async def test_a_late_mask_delays_one_step_only() -> None:
    guided, free = sequence(4, 5), sequence(4, 20)
    guided.matcher = ScriptedMatcher(late_s=60)
    async with running(Model()) as steps:
        late, other = steps.open(REQUEST, guided), steps.open(REQUEST, free)
        async with asyncio.timeout(1):  # the clock jumps
            assert len(await chunks(other)) == 20
        steps.close(late)


async def test_a_step_waits_for_masks_that_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.embedded.steps._MASK_PATIENCE_S", PATIENCE_S)
    model = Model()
    guided, free = sequence(4, 5), sequence(4, 60)
    guided.matcher = ScriptedMatcher()
    async with running(model) as steps:
        calls = [steps.open(REQUEST, each) for each in (guided, free)]
        for call in calls:
            await chunks(call)
        steps.close(calls[0])
    first = next(i for i, step in enumerate(model.steps) if guided in step)
    assert [guided in step for step in model.steps[first : first + 6]] == [True] * 5 + [False]


async def test_a_form_that_cannot_be_followed_ends_its_call() -> None:
    guided = sequence(4)
    guided.matcher = ScriptedMatcher(fails_with=InvalidRequest("no", param="text.format"))
    async with running(Model()) as steps:
        with pytest.raises(InvalidRequest) as refused:
            await chunks(steps.open(REQUEST, guided))
        assert refused.value.param == "text.format"
