"""When a worker none of whose requests makes progress is examined, and when it is given up."""

import asyncio
from contextlib import ExitStack

import msgspec
import pytest

from baton.messages import WorkerInfo
from frontend.routing.workers import Calls
from tests.clock import jumping
from tests.scripted_workers import waiting, worker

D1, D2 = worker("d1"), worker("d2")


class Scene:
    """A watchdog whose judge finds `is_stuck`, after `takes_s`."""

    def __init__(self, *, is_stuck: bool = True, takes_s: float = 0.0, no_progress_s: float = 10.0) -> None:
        self.has_ended = False
        self.judged: list[tuple[str, float]] = []
        self.given_up: list[str] = []
        self.is_stuck = is_stuck
        self.takes_s = takes_s
        self.calls = Calls(self._judge, lambda w: self.given_up.append(w.worker_id), no_progress_s)

    async def _judge(self, worker: WorkerInfo) -> bool:
        self.judged.append((worker.worker_id, round(asyncio.get_running_loop().time())))
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.has_ended = True
        return self.is_stuck

    async def __aenter__(self) -> "Scene":
        self._checking = asyncio.create_task(self.calls.watch(lambda _: True))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._checking.cancel()
        await asyncio.gather(self._checking, return_exceptions=True)
        await asyncio.sleep(0)


@pytest.mark.parametrize("no_progress_s", [10, 20])
@jumping
async def test_a_worker_whose_requests_make_no_progress_is_judged(no_progress_s: float) -> None:
    async with Scene(no_progress_s=no_progress_s) as scene:
        with waiting(scene.calls, D1, []), waiting(scene.calls, D1, [1, 2]):
            await asyncio.sleep(1.1 * no_progress_s)
        await asyncio.sleep(60)  # without requests nothing is expected of it
    assert (scene.judged, scene.given_up) == ([("d1", no_progress_s)], ["d1"])


@jumping
async def test_progress_of_one_request_is_enough_and_each_worker_is_watched_alone() -> None:
    again = msgspec.structs.replace(D1, incarnation="d1 again")
    async with Scene() as scene:
        tokens: list[int] = []
        with ExitStack() as stack:
            for each, of in ((again, tokens), (again, []), (D1, []), (D2, [])):
                stack.enter_context(waiting(scene.calls, each, of))
            for _ in range(4):
                await asyncio.sleep(5)
                tokens.append(1)
    assert {name for name, _ in scene.judged} == {"d1", "d2"}


@jumping
async def test_tokens_of_ended_requests_are_progress_but_errors_are_not() -> None:
    async with Scene() as scene:
        with waiting(scene.calls, D1, []):
            for number in range(12):
                tokens: list[int] = []
                with waiting(scene.calls, D1, tokens):
                    await asyncio.sleep(2)
                    if number < 6:  # else the queue is full
                        tokens.append(1)
    ((_, at),) = scene.judged
    assert at == pytest.approx(12 + 10, abs=1)


@jumping
async def test_tokens_from_an_earlier_attempt_are_no_progress() -> None:
    async with Scene() as scene:
        with waiting(scene.calls, D1, []):
            await asyncio.sleep(5)
            with waiting(scene.calls, D1, [1, 2]):
                await asyncio.sleep(1)
            await asyncio.sleep(5)
    assert [at for _, at in scene.judged] == [10]


@jumping
async def test_judging_ends_with_the_watchdog() -> None:
    async with Scene(takes_s=1000) as scene:
        with waiting(scene.calls, D1, []):
            await asyncio.sleep(11)
    assert (len(scene.judged), scene.has_ended) == (1, True)


@jumping
async def test_a_worker_that_progresses_while_it_is_judged_is_not_given_up() -> None:
    async with Scene(takes_s=10) as scene:
        tokens: list[int] = []
        with waiting(scene.calls, D1, tokens):
            await asyncio.sleep(15)
            tokens.append(1)
            await asyncio.sleep(6)
    assert (len(scene.judged), scene.given_up) == (1, [])


@jumping
async def test_the_longest_wait_is_that_of_the_oldest_request_that_still_waits() -> None:
    async with Scene() as scene:
        assert scene.calls.longest_wait_s(D1) == 0
        with waiting(scene.calls, D1, []):
            await asyncio.sleep(2)
            with waiting(scene.calls, D1, []):
                await asyncio.sleep(1)
                assert scene.calls.longest_wait_s(D1) == pytest.approx(3)
                assert scene.calls.longest_wait_s(D2) == 0
        assert scene.calls.longest_wait_s(D1) == 0
