"""What ends a call in a third-party engine from outside, at an awkward moment, and with the engine."""

import asyncio
import dataclasses

import pytest
from workers.engines.calls import Ending, OpenCalls

from baton.errors import DeadlineExceeded, HandoffFailed, NotReady, WorkerLost
from tests.clock import run_jumping


@dataclasses.dataclass(eq=False)
class Call:
    ending: Ending = dataclasses.field(default_factory=Ending)


async def test_a_call_that_is_being_ended_may_be_ended_again() -> None:
    """As by two steps that count failed pulls; vLLM dies of an error that a stat logger raises."""
    ending = Ending()
    pinned = asyncio.create_task(ending.pinned(60))
    await asyncio.sleep(0)  # it waits
    ending.end_with(HandoffFailed("the first"))
    await asyncio.sleep(0)  # its timeout has begun to expire
    ending.end_with(WorkerLost("the second"))
    with pytest.raises(WorkerLost):
        await pinned


async def test_a_time_that_has_come_ends_the_wait_and_an_engines_own_timeout_is_its_own() -> None:
    async def broken() -> None:
        raise TimeoutError("the engine's")

    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded, match="The request exceeded its deadline"):
        await Ending().wait(asyncio.Event().wait(), now, DeadlineExceeded())
    with pytest.raises(TimeoutError, match="the engine's"):
        await Ending().wait(broken(), now + 60, DeadlineExceeded())


async def test_a_pinned_request_waits_as_long_as_it_may() -> None:
    pinned = asyncio.create_task(Ending().pinned(60))
    assert await asyncio.wait([pinned], timeout=0.01) == (set(), {pinned})
    pinned.cancel()
    with pytest.raises(HandoffFailed, match=r"within 0\.001 s"):
        await Ending().pinned(0.001)


def test_a_pin_ends_when_its_time_is_over() -> None:
    async def main() -> float:
        with pytest.raises(HandoffFailed, match="within 60 s"):
            await Ending().pinned(60)
        return asyncio.get_running_loop().time()

    assert run_jumping(main()) == pytest.approx(60)


async def test_a_call_may_be_ended_between_two_waits_and_then_begins_nothing() -> None:
    begun: list[str] = []

    async def work() -> str:
        begun.append("work")
        return "done"

    ending, loop = Ending(), asyncio.get_running_loop()
    assert await ending.wait(work(), loop.time() + 60, DeadlineExceeded()) == "done"
    ending.end_with(WorkerLost("meanwhile"))
    with pytest.raises(WorkerLost, match="meanwhile"):
        await ending.wait(work(), loop.time() + 60, DeadlineExceeded())
    assert begun == ["work"]


async def test_stopping_ends_every_call_and_returns_what_is_to_be_shut_down() -> None:
    calls: OpenCalls[Call] = OpenCalls()
    llm = calls.llm = object()
    calls.calls = {Call(), Call()}
    waiting = [asyncio.create_task(call.ending.pinned(60)) for call in calls.calls]
    await asyncio.sleep(0)  # they wait
    assert calls.stop() is llm
    for task in waiting:
        with pytest.raises(WorkerLost, match="stopped"):
            await task
    with pytest.raises(NotReady):
        calls.check_running()
    assert calls.stop() is None


async def test_a_dead_engine_is_a_lost_worker_to_every_call_and_to_the_next() -> None:
    calls: OpenCalls[Call] = OpenCalls()
    with pytest.raises(NotReady):
        calls.check_running()
    calls.llm = object()
    calls.calls = {Call(), Call()}
    calls.check_running()

    calls.break_off("its core died")
    calls.break_off("and again")

    for call in calls.calls:
        with pytest.raises(WorkerLost, match="its core died"):
            await call.ending.pinned(60)
    with pytest.raises(WorkerLost, match="its core died"):
        calls.check_running()
    assert calls.broke.is_set()


async def test_a_result_that_comes_with_the_end_is_not_given_out() -> None:
    ending = Ending()

    async def answer() -> int:
        ending.end_with(HandoffFailed("the KV did not arrive"))
        return 1

    with pytest.raises(HandoffFailed):
        await ending.wait(answer(), asyncio.get_running_loop().time() + 60, DeadlineExceeded())
