"""The embedded engine's step loop over a scripted model: what is delivered, counted and ended."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from baton.errors import DeadlineExceeded, InvalidRequest, WorkerLost
from baton.messages import TokenChunk
from tests.clock import jumping
from tests.embedded import scheduler, sequence
from tests.guided import ScriptedMatcher
from tests.planes import a_request
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Sequence, Work
from workers.engines.embedded.steps import Call, StepLoop

REQUEST = a_request()


class Model:
    """Samples token 7 each time, once `may_step` is set."""

    def __init__(self) -> None:
        self.steps: list[list[Sequence]] = []
        self.may_step = threading.Event()
        self.may_step.set()
        self.loses_tokens = False

    def step(self, work: list[Work]) -> list[list[Sampled]]:
        """See Runner."""
        self.steps.append([each.sequence for each in work])
        self.may_step.wait(PATIENCE_S)
        return [] if self.loses_tokens else [[Sampled(7)] if w.samples else [] for w in work]


def opened(steps: StepLoop, sequence: Sequence) -> Call:
    return steps.open(REQUEST, sequence, asyncio.get_running_loop().time() + PATIENCE_S)


@contextlib.asynccontextmanager
async def running(model: Model) -> AsyncGenerator[StepLoop, None]:
    runner: Any = model
    with ThreadPoolExecutor(1) as thread:
        steps = StepLoop(runner, thread, scheduler(), max_calls=9)
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


@pytest.mark.parametrize("end", [StepLoop.close, lambda steps, call: steps.fail(call, DeadlineExceeded())])
async def test_a_call_that_ends_during_a_step_does_not_hurt_the_others(
    end: Callable[[StepLoop, Call], None],
) -> None:
    model = Model()
    async with running(model) as steps:
        model.may_step.clear()
        gone, stays = opened(steps, sequence(4)), opened(steps, sequence(4))
        await until(lambda: len(model.steps) == 1)
        end(steps, gone)
        model.may_step.set()
        assert len(await chunks(stays)) == 3
        assert steps.scheduler.counts["num_generated_tokens"] == 3
        assert not steps.broke.done()


async def test_a_step_that_loses_tokens_breaks_the_engine_and_is_reported() -> None:
    model = Model()
    model.loses_tokens = True
    async with running(model) as steps:
        with pytest.raises(WorkerLost, match="ValueError: zip"):
            await chunks(opened(steps, sequence(4)))
        assert steps.broke.done()
        with pytest.raises(WorkerLost, match="ValueError: zip"):
            opened(steps, sequence(4))


@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("pulls_kv", [False, True])
@jumping
async def test_each_token_of_a_guided_answer_has_a_mask_of_its_own(late_s: float, pulls_kv: bool) -> None:
    guided = sequence(4, pulls_kv=pulls_kv)
    guided.matcher = matcher = ScriptedMatcher(late_s)
    async with running(Model()) as steps:
        call = opened(steps, guided)
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
        late, other = opened(steps, guided), opened(steps, free)
        async with asyncio.timeout(1):  # the clock jumps
            assert len(await chunks(other)) == 20
        steps.close(late)


async def test_a_step_waits_for_masks_that_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.embedded.steps._MASK_PATIENCE_S", PATIENCE_S)
    model = Model()
    guided, free = sequence(4, 5), sequence(4, 60)
    guided.matcher = ScriptedMatcher()
    async with running(model) as steps:
        calls = [opened(steps, each) for each in (guided, free)]
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
            await chunks(opened(steps, guided))
        assert refused.value.param == "text.format"
