"""The states of registered workers, and the probes that bring them back."""

import asyncio
from itertools import product

import msgspec
import pytest

from baton.messages import WorkerInfo
from frontend.routing.workers import TRANSITIONS, Event, State, Workers
from tests.clock import jumping
from tests.scripted_workers import worker

D1 = worker("d1")
PROBES = {Event.ANSWERED, Event.SILENT, Event.UNTRUSTED}


class Scene:
    """One registered worker, whose probes end as set for its state."""

    def __init__(self) -> None:
        self.num_probes = 0
        self.outcomes: dict[State, Event] = {}
        self.workers = Workers(self._probe)
        self.workers.update([D1])

    def state(self) -> State:
        (state,) = (state for state in State if self.workers.of(state))
        return state

    async def _probe(self, probed: WorkerInfo, state: State) -> tuple[Event, str]:
        assert probed == D1
        self.num_probes += 1
        await asyncio.sleep(0.01)
        event = self.outcomes.get(state, Event.SILENT)
        return event, "its certificate is odd" if event is Event.UNTRUSTED else ""


@pytest.mark.parametrize(("state", "event"), list(product(State, Event)))
def test_each_event_has_a_next_state_or_cannot_happen(state: State, event: Event) -> None:
    is_probed = state in {State.NEW, State.LOST, State.STUCK, State.DISTRUSTED}
    is_possible = event not in PROBES or (is_probed and (state, event) != (State.STUCK, Event.UNTRUSTED))
    assert ((state, event) in TRANSITIONS) is is_possible


@jumping
async def test_a_lost_worker_is_probed_by_one_task_at_a_time() -> None:
    scene = Scene()
    for _ in range(3):
        scene.workers.note(D1, Event.LOST)
        scene.workers.update([D1])
    await asyncio.sleep(0.3)
    assert scene.num_probes == len(scene.workers.tasks()) == 1


@jumping
async def test_a_lost_worker_that_is_found_stuck_must_work_again() -> None:
    scene = Scene()
    scene.outcomes = dict.fromkeys((State.NEW, State.LOST), Event.ANSWERED)
    scene.workers.note(D1, Event.LOST)
    scene.workers.note(D1, Event.STALLED)
    await asyncio.sleep(5)
    assert scene.state() is State.STUCK
    scene.outcomes[State.STUCK] = Event.ANSWERED
    await asyncio.sleep(1)
    assert scene.state() is State.LIVE


@jumping
async def test_a_distrusted_worker_is_named_until_it_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.outcomes = dict.fromkeys(State, Event.UNTRUSTED)
    await asyncio.sleep(3)
    assert scene.workers.reasons(State.DISTRUSTED) == ["d1: its certificate is odd"]
    scene.outcomes[State.DISTRUSTED] = Event.ANSWERED
    await asyncio.sleep(1)
    assert scene.workers.of(State.LIVE) == [D1]
    assert caplog.text.count("distrusted worker=d1: its certificate is odd") == 1


@jumping
async def test_a_refused_worker_stays_refused_and_is_not_probed() -> None:
    scene = Scene()
    scene.workers.note(D1, Event.INVALID, "it sent odd tokens")
    scene.workers.note(D1, Event.LOST)
    scene.workers.note(D1, Event.INVALID, "again")
    assert scene.workers.reasons(State.REFUSED) == ["d1: it sent odd tokens"]
    assert not scene.workers.tasks()
    scene.workers.update([])
    assert not scene.workers.all()


@jumping
async def test_a_worker_that_leaves_is_not_probed_and_is_new_when_it_returns() -> None:
    scene = Scene()
    scene.workers.update([])
    scene.workers.note(D1, Event.LOST)
    await asyncio.sleep(3)
    assert scene.num_probes == 0
    scene.workers.update([D1])
    assert scene.state() is State.NEW
    scene.workers.update([msgspec.structs.replace(D1, is_ready=False)])
    assert scene.state() is State.WARMING
