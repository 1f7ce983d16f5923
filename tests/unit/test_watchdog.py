"""When a worker that gets on with none of its requests is looked at, and when it is given up."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack, suppress

import msgspec
import pytest

from baton.messages import WorkerInfo
from frontend.routing.watchdog import Watchdog
from tests.clock import run_jumping
from tests.scripted_workers import worker

D1, D2 = worker("d1"), worker("d2")


class Scene:
    """A watchdog whose judge says `is_stuck`, after `takes_s`."""

    def __init__(self, *, is_stuck: bool = True, takes_s: float = 0.0, no_progress_s: float = 10.0) -> None:
        self.has_ended = self.has_ended_in_time = False
        self.judged: list[tuple[str, float, float]] = []
        self.given_up: list[str] = []
        self.is_stuck = is_stuck
        self.takes_s = takes_s
        self.watchdog = Watchdog(self._judge, lambda w: self.given_up.append(w.worker_id), no_progress_s)

    async def _judge(self, worker: WorkerInfo, limit_s: float) -> bool:
        self.judged.append((worker.worker_id, round(asyncio.get_running_loop().time()), limit_s))
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.has_ended = True
        return self.is_stuck

    def run(self, scenario: Coroutine[None, None, None], *, is_registered: bool = True) -> None:
        async def main() -> None:
            checking = asyncio.create_task(self.watchdog.check(lambda _: is_registered))
            await scenario
            checking.cancel()
            await asyncio.gather(checking, return_exceptions=True)
            await asyncio.sleep(0)
            self.has_ended_in_time = self.has_ended

        run_jumping(main())


def test_a_worker_that_holds_requests_and_is_quiet_for_ten_seconds_is_judged() -> None:
    scene = Scene()

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []), scene.watchdog.waiting(D1, [1, 2]):
            await asyncio.sleep(11)
        await asyncio.sleep(60)  # without requests nothing is expected of it

    scene.run(scenario())
    assert (scene.judged, scene.given_up) == ([("d1", 10, 10.0)], ["d1"])


def test_progress_of_one_request_is_enough_and_each_worker_is_watched_alone() -> None:
    scene = Scene()

    async def scenario() -> None:
        tokens: list[int] = []
        with ExitStack() as waiting:
            for each, of in ((D1, tokens), (D1, []), (D2, [])):
                waiting.enter_context(scene.watchdog.waiting(each, of))
            for _ in range(4):
                await asyncio.sleep(5)
                tokens.append(1)

    scene.run(scenario())
    assert {name for name, _, _ in scene.judged} == {"d2"}


def test_tokens_of_ended_requests_are_progress_but_errors_are_not() -> None:
    scene = Scene()

    async def one(*, is_refused: bool) -> None:
        tokens: list[int] = []
        with suppress(ConnectionError), scene.watchdog.waiting(D1, tokens):
            await asyncio.sleep(2)
            if is_refused:
                raise ConnectionError("the queue is full")
            tokens.append(1)

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []):
            for i in range(12):
                await one(is_refused=i >= 6)

    scene.run(scenario())
    ((_, at, _),) = scene.judged
    assert at == pytest.approx(12 + 10, abs=1)


def test_a_worker_with_long_pauses_is_judged_after_four_times_its_longest() -> None:
    scene = Scene(is_stuck=False)

    async def scenario() -> None:
        tokens: list[int] = []
        with scene.watchdog.waiting(D1, tokens):
            await asyncio.sleep(9.5)
            tokens.append(1)
            await asyncio.sleep(100)

    scene.run(scenario())
    _, at, limit_s = scene.judged[0]
    assert limit_s == pytest.approx(36, abs=2)
    assert at == pytest.approx(10 + 36, abs=2)
    assert len(scene.judged) == 2  # again, after as long


def test_the_longest_pause_counts_also_after_shorter_ones_and_times_without_requests() -> None:
    scene = Scene(is_stuck=False)

    async def scenario() -> None:
        for pause_s in (9.5, 2, 2):
            tokens: list[int] = []
            with scene.watchdog.waiting(D1, tokens):
                await asyncio.sleep(pause_s)
                tokens.append(1)
                await asyncio.sleep(2)
            await asyncio.sleep(5)
        with scene.watchdog.waiting(D1, []):
            await asyncio.sleep(50)

    scene.run(scenario())
    ((_, _, limit_s),) = scene.judged
    assert limit_s == pytest.approx(36, abs=2)


def test_a_long_pause_is_half_forgotten_after_ten_minutes() -> None:
    scene = Scene(is_stuck=False)

    async def scenario() -> None:
        tokens: list[int] = []
        with scene.watchdog.waiting(D1, tokens):
            await asyncio.sleep(9.5)
            for _ in range(693):
                tokens.append(1)
                await asyncio.sleep(1)
            await asyncio.sleep(30)

    scene.run(scenario())
    _, _, limit_s = scene.judged[0]
    assert limit_s == pytest.approx(18, abs=2)


def test_tokens_from_an_earlier_attempt_are_no_progress() -> None:
    scene = Scene()

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []):
            await asyncio.sleep(5)
            with scene.watchdog.waiting(D1, [1, 2]):
                await asyncio.sleep(1)
            await asyncio.sleep(5)

    scene.run(scenario())
    assert [at for _, at, _ in scene.judged] == [10]


def test_the_judge_learns_for_how_long_a_worker_was_quiet() -> None:
    scene = Scene(no_progress_s=20.0)

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []):
            await asyncio.sleep(21)

    scene.run(scenario())
    assert scene.judged == [("d1", 20, 20.0)]


def test_judging_ends_with_the_watchdog() -> None:
    scene = Scene(takes_s=1000)

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []):
            await asyncio.sleep(11)

    scene.run(scenario())
    assert (len(scene.judged), scene.has_ended_in_time) == (1, True)


def test_a_worker_that_gets_on_while_it_is_judged_is_not_given_up() -> None:
    scene = Scene(takes_s=10)

    async def scenario() -> None:
        tokens: list[int] = []
        with scene.watchdog.waiting(D1, tokens):
            await asyncio.sleep(15)
            tokens.append(1)
            await asyncio.sleep(6)

    scene.run(scenario())
    assert (len(scene.judged), scene.given_up) == (1, [])


def test_a_worker_that_has_left_is_forgotten_with_its_last_request() -> None:
    scene = Scene()
    held = scene.watchdog._held  # noqa: SLF001  it is only memory

    async def scenario() -> None:
        with scene.watchdog.waiting(D1, []):
            await asyncio.sleep(5)
            assert held
        await asyncio.sleep(5)
        assert not held

    scene.run(scenario(), is_registered=False)


def test_a_worker_that_was_started_again_is_another_one() -> None:
    scene = Scene()
    again = msgspec.structs.replace(D1, incarnation="d1 again")

    async def scenario() -> None:
        tokens: list[int] = []
        with scene.watchdog.waiting(D1, []), scene.watchdog.waiting(again, tokens):
            for _ in range(11):
                await asyncio.sleep(1)
                tokens.append(1)

    scene.run(scenario())
    assert [name for name, _, _ in scene.judged] == ["d1"]
