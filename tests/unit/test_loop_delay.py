"""The longest time that an event loop stood still since an instant."""

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from baton.loop_delay import LoopDelay


class Clock:
    """A clock and a loop whose timer fires when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.delays = LoopDelay()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", lambda: self)
            self.delays.start()

    def call_later(self, delay_s: float, tick: Callable[..., None], *args: object) -> None:
        self.due_s, self._tick, self._args = self.now_s + delay_s, tick, args

    def fire(self, late_s: float) -> None:
        self.now_s = self.due_s + late_s
        self._tick(*self._args)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made: list[Clock] = []
    monkeypatch.setattr(time, "perf_counter", lambda: made[0].now_s if made else 100.0)
    made.append(Clock(monkeypatch))
    return made[0]


def test_nothing_is_noted_before_the_start() -> None:
    assert LoopDelay().longest(float("-inf")).lasted_s == 0


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_longest_of_the_delays_and_of_the_first_only_the_part_since_then(
    clock: Clock, seed: int
) -> None:
    chance = random.Random(seed)
    delays: list[tuple[float, float]] = []
    for _ in range(200):
        due_s, late_s = clock.due_s, chance.choice([0.0, 0.0, chance.uniform(0.02, 2.0)])
        clock.fire(late_s)
        if late_s:
            delays.append((due_s, clock.now_s))
    for _ in range(200):
        since_s = chance.uniform(100, clock.now_s)
        expected = max((end - max(since_s, begin) for begin, end in delays if end > since_s), default=0.0)
        assert clock.delays.longest(since_s).lasted_s == pytest.approx(expected)


def test_a_delay_counts_before_the_timer_has_fired(clock: Clock) -> None:
    began_s = clock.now_s
    clock.now_s = clock.due_s + 1.5
    assert clock.delays.longest(began_s).lasted_s == pytest.approx(1.5)
    assert clock.delays.longest(clock.now_s - 0.5).lasted_s == pytest.approx(0.5)


@pytest.mark.parametrize("is_noted", [True, False])
def test_work_that_begins_right_after_a_delay_may_have_waited_for_it(clock: Clock, is_noted: bool) -> None:
    clock.fire(0.0)
    if is_noted:
        clock.fire(3.0)
    else:
        clock.now_s = clock.due_s + 3.0
    assert clock.delays.longest(clock.delays.seen_s).lasted_s == pytest.approx(3.0)
    for _ in range(2):
        clock.fire(0.0)
    assert clock.delays.longest(clock.delays.seen_s).lasted_s == 0


def test_of_a_delay_it_knows_how_long_the_thread_waited_for_a_cpu(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = clock.now_s
    monkeypatch.setattr("baton.loop_delay._starved_s", lambda: 0.4)
    clock.delays.starved_s = 0.0
    clock.fire(1.0)
    assert clock.delays.longest(began_s) == pytest.approx((1.0, 0.4))
    assert clock.delays.longest(clock.now_s - 0.3) == pytest.approx((0.3, 0.3))
