"""Which workers get requests: their states, probes and events, the watchdog of their calls, cut pairs."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from baton.errors import HandoffStalled, WorkerLost
from baton.loop_delay import Delay, LoopDelay
from baton.messages import GenerateRequest, Reply, Role, WorkerInfo, WorkerStats
from frontend.routing.fleet import Fleet
from frontend.routing.health import Events
from frontend.routing.workers import TRANSITIONS, CutPairs, Event, State, Workers
from tests.clock import jumping, now_s
from tests.scripted_workers import Script, ScriptedWorkers, answer, failing, hand_off, waiting, worker
from tests.waiting import until

D1 = worker("d1")


@asynccontextmanager
async def fleet_of_two() -> AsyncIterator[tuple[ScriptedWorkers, Fleet]]:
    """The workers d1 and p1, which answer probes."""
    workers = ScriptedWorkers(d1=answer, p1=hand_off)
    workers.answering = {"d1", "p1"}
    fleet = Fleet(workers, workers, model_path=Path("/none"))
    async with fleet.keep_current():
        await until(lambda: fleet.health().instances)
        yield workers, fleet


async def hung(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
    """An engine that answers no request."""
    await asyncio.sleep(sent.deadline_s)  # all of its time
    async for reply in failing(WorkerLost("over"))(sent):
        yield reply


def live(fleet: Fleet) -> list[str]:
    return [w.worker_id for role in Role for w in fleet.workers("m", role)]


@pytest.mark.parametrize(("name", "works"), [("d1", answer), ("p1", hand_off)])
@jumping
async def test_a_worker_whose_engine_hangs_is_left_out_until_a_request_passes_through_a_pair(
    name: str, works: Script
) -> None:
    async with fleet_of_two() as (workers, fleet):
        workers.scripts[name] = hung
        with waiting(fleet.calls, worker(name), []):
            await asyncio.sleep(19)  # virtual time
            assert not workers.lost
            await asyncio.sleep(2)  # virtual time
        assert workers.lost == [name]
        assert (fleet.health().stuck, fleet.health().lost) == ([name], [])
        assert name not in live(fleet)
        await asyncio.sleep(60)  # virtual time
        assert fleet.health().stuck == [name]
        workers.scripts[name] = works
        workers.calls.clear()
        await until(lambda: not fleet.health().stuck)
        assert workers.called[-2:] == ["p1", "d1"]
        assert len(live(fleet)) == 2


@pytest.mark.parametrize("figure", ["", "num_prompt_tokens", "num_generated_tokens", "num_handoffs"])
@jumping
async def test_a_worker_that_answers_our_own_request_or_computes_for_others_is_not_stuck(figure: str) -> None:
    async with fleet_of_two() as (workers, fleet):
        if figure:
            workers.scripts["d1"] = hung  # our own request waits in its queue
            workers.stats = lambda: WorkerStats(**{figure: round(now_s())})
        with waiting(fleet.calls, D1, []):
            await asyncio.sleep(45)  # virtual time
        assert len(workers.called) == (2 if figure else 4)
        assert (workers.lost, live(fleet)) == ([], ["p1", "d1"])


@jumping
async def test_a_worker_that_does_not_answer_at_all_is_left_to_the_liveness_limit() -> None:
    async with fleet_of_two() as (workers, fleet):
        workers.answering.clear()
        with waiting(fleet.calls, D1, []):
            await asyncio.sleep(60)  # virtual time
        assert (workers.lost, fleet.health().stuck, workers.called) == ([], [], [])


@jumping
async def test_tokens_of_ended_requests_are_progress_but_errors_are_not() -> None:
    async with fleet_of_two() as (workers, fleet):
        workers.scripts["d1"] = hung
        with waiting(fleet.calls, D1, []):
            for number in range(18):
                tokens: list[int] = []
                with waiting(fleet.calls, D1, tokens):
                    await asyncio.sleep(2)  # virtual time
                    if number < 6:  # else the queue is full
                        tokens.append(1)
                assert number > 13 or not workers.lost, "12 s with tokens, 10 without, 10 for a trial"
        assert workers.lost


P1, P2 = worker("p1"), worker("p2")


@jumping
async def test_a_cut_pair_is_tried_after_ten_seconds_then_less_and_less_often() -> None:
    loop_s: list[float] = []

    async def stalling(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        loop_s.append(now_s())
        works = answer if len(loop_s) == 6 else failing(HandoffStalled("nothing came"))
        async for reply in works(sent):
            yield reply

    async def probe(*_: object) -> tuple[Event, str]:
        return "answered", ""

    fleet, events = ScriptedWorkers(p1=hand_off, d1=stalling), Events()
    table = Workers(probe, Events(), LoopDelay())
    table.update([P1, D1])
    pairs = CutPairs(fleet, table, events)
    pairs.add(P1, D1)
    pairs.add(P1, D1)
    assert (pairs.has(P1, D1), pairs.has(P2, D1), pairs.names()) == (True, False, ["p1 -> d1"])
    assert not pairs.has(msgspec.structs.replace(P1, incarnation="p1.2"), D1), "it was started again"
    (trial,) = pairs.trials.values()
    await trial
    assert loop_s == pytest.approx([10, 30, 70, 130, 190, 250])
    assert fleet.called == ["p1", "d1"] * 6
    assert {sent.deadline_s for _, sent in fleet.calls} == {5}
    assert (pairs.has(P1, D1), pairs.names(), fleet.open) == (False, [], [])
    found = [(event.kind, event.what, event.lasted_s) for event in events.newest(9)]
    assert found == [("restored", "p1 -> d1", 250), ("cut", "p1 -> d1", None)]


PROBES = {"answered", "silent", "untrusted"}


class Scene:
    """One registered worker, whose probes end as set for its state."""

    def __init__(self, outcome: Event = "silent", delays: LoopDelay | None = None) -> None:
        self.num_probes = 0
        self.outcomes = dict.fromkeys(State, outcome)
        self.events = Events()
        self.workers = Workers(self._probe, self.events, delays or LoopDelay())
        self.workers.update([D1])

    def state(self) -> State:
        (state,) = (state for state in State if self.workers.of(state))
        return state

    def seen(self) -> list[tuple[str, str, str, float | None]]:
        """The events after the first one, the oldest first."""
        first, *others = reversed(self.events.newest(99))
        assert (first.kind, first.what) == ("joined", "d1")
        return [(e.kind, e.what, e.detail, e.lasted_s and round(e.lasted_s)) for e in others]

    async def _probe(self, _: WorkerInfo, state: State) -> tuple[Event, str]:
        self.num_probes += 1
        await asyncio.sleep(0.01)  # virtual time
        event = self.outcomes[state]
        return event, "its certificate is odd" if event == "untrusted" else ""


@pytest.mark.parametrize(("state", "event"), list(product(State, get_args(Event))))
def test_each_event_has_a_next_state_or_cannot_happen(state: State, event: Event) -> None:
    is_probed = state in {State.NEW, State.LOST, State.STUCK, State.DISTRUSTED}
    is_possible = event not in PROBES or (is_probed and (state, event) != (State.STUCK, "untrusted"))
    assert ((state, event) in TRANSITIONS) is is_possible


@jumping
async def test_a_lost_worker_that_is_found_stuck_must_work_again() -> None:
    scene = Scene("answered")
    scene.outcomes[State.STUCK] = "silent"
    scene.workers.note(D1, "lost")
    scene.workers.note(D1, "stalled")
    await asyncio.sleep(5)  # virtual time
    assert scene.state() is State.STUCK
    scene.outcomes[State.STUCK] = "answered"
    await asyncio.sleep(1)  # virtual time
    assert scene.state() is State.LIVE


@jumping
async def test_a_distrusted_worker_is_named_until_it_is_trusted(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene("untrusted")
    await asyncio.sleep(3)  # virtual time
    assert scene.workers.reasons(State.DISTRUSTED) == ["d1: its certificate is odd"]
    scene.outcomes[State.DISTRUSTED] = "answered"
    await asyncio.sleep(1)  # virtual time
    assert scene.workers.of(State.LIVE) == [D1]
    assert caplog.text.count('worker refused worker=d1 detail="its certificate is odd"') == 1
    assert [kind for kind, *_ in scene.seen()] == ["refused", "recovered"]


@jumping
async def test_a_refused_worker_stays_refused_and_is_not_probed() -> None:
    scene = Scene()
    scene.workers.note(D1, "invalid", "it sent odd tokens")
    scene.workers.note(D1, "lost")
    scene.workers.note(D1, "invalid", "again")
    assert scene.workers.reasons(State.REFUSED) == ["d1: it sent odd tokens"]
    assert scene.seen() == [("refused", "d1", "it sent odd tokens", None)]
    assert not scene.workers.tasks()
    scene.workers.update([])
    assert not scene.workers.all()


@jumping
async def test_a_worker_that_leaves_is_not_probed_and_is_new_when_it_returns() -> None:
    scene = Scene()
    scene.workers.update([])
    scene.workers.note(D1, "lost")
    await asyncio.sleep(3)  # virtual time
    assert scene.num_probes == 0
    scene.workers.update([D1])
    assert scene.state() is State.NEW
    scene.workers.update([msgspec.structs.replace(D1, is_ready=False)])
    assert scene.state() is State.WARMING


@jumping
async def test_a_name_is_the_first_workers_until_it_leaves() -> None:
    workers = Scene().workers
    names = {"d9": "decode-0", "d1": "decode-0", "d2": "d9"}
    first, second, thief = (
        msgspec.structs.replace(worker(worker_id), name=name) for worker_id, name in names.items()
    )
    workers.update([first])
    workers.update([second, thief, first])
    assert {each.worker_id: each.label for each in workers.all()} == names | {"d1": "d1", "d2": "d2"}
    workers.update([second, thief])
    assert {each.worker_id: each.label for each in workers.all()} == {"d1": "decode-0", "d2": "d9"}


class StoodStill(LoopDelay):
    """That of a frontend that stood still for a second, at any time."""

    def longest(self, since_s: float) -> Delay:
        return Delay(1.0)


@pytest.mark.parametrize(("event", "reason"), [("lost", "no response"), ("stalled", "its engine hangs")])
@jumping
async def test_a_lost_worker_that_returns_was_away_for_a_time(event: Event, reason: str) -> None:
    scene = Scene("answered")
    await asyncio.sleep(1)  # virtual time
    scene.outcomes = dict.fromkeys(State, "silent")
    scene.workers.note(D1, event, reason)
    await asyncio.sleep(5.1)  # virtual time
    scene.outcomes = dict.fromkeys(State, "answered")
    await asyncio.sleep(1)  # virtual time
    assert scene.seen() == [("lost", "d1", reason, None), ("recovered", "d1", "", 5)]


LEFT, STOOD_STILL = ("left", ""), ("left", "or lost: this frontend stood still")
ENDED = ("lost", "it ended without leaving the registry first")


@pytest.mark.parametrize(
    ("answers", "delays", "is_lost", "expected"),
    [
        ("answered", LoopDelay(), False, LEFT),
        ("silent", LoopDelay(), False, ENDED),
        ("answered", StoodStill(), False, LEFT),
        ("silent", StoodStill(), False, STOOD_STILL),
        ("silent", LoopDelay(), True, ("lost", "gone")),
    ],
)
@jumping
async def test_a_worker_whose_registration_ends_has_left_or_was_lost_once(
    answers: Event, delays: LoopDelay, is_lost: bool, expected: tuple[str, str]
) -> None:
    scene = Scene("answered", delays)
    await asyncio.sleep(1)  # virtual time
    scene.outcomes = dict.fromkeys(State, answers)
    if is_lost:
        scene.workers.note(D1, "lost", "gone")
    scene.workers.update([])
    await asyncio.gather(*scene.workers.tasks())
    assert scene.seen() == [(expected[0], "d1", expected[1], None)]
    assert not scene.workers.tasks()
    scene.workers.update([D1])
    assert scene.events.newest(1)[0].detail.endswith("same process as before") == (expected[0] == "lost")
    scene.workers.update([])
    await asyncio.gather(*scene.workers.tasks())


def test_a_full_pool_is_one_event_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    events = Events()
    for now_s[0] in (1000, 1008, 1016, 1080, 1089):
        events.full("decode pool of m", f"at {now_s[0]}")
    assert [(event.at_s, event.lasted_s, event.detail) for event in events.newest(9)] == [
        (1089, 9, "at 1080"),
        (1016, 16, "at 1000"),
    ]
    assert caplog.records[0].getMessage() == 'pool full pool="decode pool of m" detail="at 1000"'
