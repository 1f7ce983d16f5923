"""What happens to the fleet becomes events with durations, and a line of the log each."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.errors import HandoffStalled, Overloaded
from baton.loop_delay import Delay, LoopDelay
from baton.messages import GenerateRequest, Reply, WorkerInfo
from baton.telemetry import Line
from frontend.explain import is_during
from frontend.metrics import Metrics
from frontend.record import Record
from frontend.routing.admission import Admission, Capacity
from frontend.routing.events import Events, FleetEvent
from frontend.routing.workers import CutPairs, Event, State, Workers
from tests.clock import jumping
from tests.scripted_workers import ScriptedWorkers, answer, failing, hand_off, request, worker

D1, P1 = worker("d1"), worker("p1")
SEEN = (990.0, 998.0, 1010.0, 1020.0)
"""When a request arrives that takes 4 s."""


class StoodStill(LoopDelay):
    """That of a frontend that stood still for a second, at any time."""

    def longest(self, since_s: float) -> Delay:
        return Delay(1.0)


class Scene:
    """One worker that has joined; `answers`: what probes find."""

    def __init__(self, delays: LoopDelay | None = None) -> None:
        self.answers = Event.ANSWERED
        self.events = Events()
        self.workers = Workers(self._probe, self.events, delays or LoopDelay())
        self.workers.update([D1])

    async def _probe(self, _: WorkerInfo, __: State) -> tuple[Event, str]:
        await asyncio.sleep(0.01)  # virtual time
        return self.answers, "its certificate is odd" if self.answers is Event.UNTRUSTED else ""

    def seen(self) -> list[tuple[str, str, str, float | None]]:
        """The events after the first one, the oldest first."""
        first, *others = reversed(self.events.newest(99))
        assert (first.kind, first.what) == ("joined", "d1")
        return [(e.kind, e.what, e.detail, e.lasted_s and round(e.lasted_s)) for e in others]


@pytest.mark.parametrize(
    ("event", "reason"), [(Event.LOST, "it does not respond"), (Event.STALLED, "its engine hangs")]
)
@jumping
async def test_a_lost_worker_that_returns_was_away_for_a_time(event: Event, reason: str) -> None:
    scene = Scene()
    await asyncio.sleep(1)  # virtual time
    scene.answers = Event.SILENT
    scene.workers.note(D1, event, reason)
    await asyncio.sleep(5.1)  # virtual time
    scene.answers = Event.ANSWERED
    await asyncio.sleep(1)  # virtual time
    assert scene.seen() == [("lost", "d1", reason, None), ("recovered", "d1", "", 5)]


@pytest.mark.parametrize(
    ("answers", "delays", "expected"),
    [
        (Event.ANSWERED, LoopDelay(), ("left", "")),
        (Event.SILENT, LoopDelay(), ("lost", "it ended without leaving the registry first")),
        (Event.ANSWERED, StoodStill(), ("left", "")),
        (Event.SILENT, StoodStill(), ("left", "or lost: this frontend stood still")),
    ],
)
@jumping
async def test_a_worker_that_dies_without_a_request_does_not_leave(
    answers: Event, delays: LoopDelay, expected: tuple[str, str]
) -> None:
    scene = Scene(delays)
    await asyncio.sleep(1)  # virtual time
    scene.answers = answers
    scene.workers.update([])
    await asyncio.gather(*scene.workers.tasks())
    assert scene.seen() == [(expected[0], "d1", expected[1], None)]
    assert not scene.workers.tasks()


@jumping
async def test_a_lost_worker_whose_registration_ends_is_no_second_event() -> None:
    scene = Scene()
    await asyncio.sleep(1)  # virtual time
    scene.answers = Event.SILENT
    scene.workers.note(D1, Event.LOST)
    scene.workers.update([])
    await asyncio.gather(*scene.workers.tasks(), return_exceptions=True)
    assert [kind for kind, *_ in scene.seen()] == ["lost"]


@jumping
async def test_a_worker_is_refused_for_its_tokens_or_its_certificate() -> None:
    scene = Scene()
    scene.answers = Event.UNTRUSTED
    await asyncio.sleep(2)  # virtual time
    scene.workers.note(D1, Event.INVALID, "it sent odd tokens")
    assert scene.seen() == [
        ("refused", "d1", "its certificate is odd", None),
        ("refused", "d1", "it sent odd tokens", None),
    ]


@jumping
async def test_a_cut_pair_is_restored_after_a_time() -> None:
    num_calls = 0

    async def stalling(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        nonlocal num_calls
        num_calls += 1
        async for reply in (failing(HandoffStalled("nothing")) if num_calls < 2 else answer)(sent):
            yield reply

    events, fleet = Events(), ScriptedWorkers(p1=hand_off, d1=stalling)
    pairs = CutPairs(fleet, lambda _: True, events)
    pairs.add(P1, D1)
    pairs.add(P1, D1)
    await asyncio.gather(*pairs.trials)
    restored, cut = events.newest(9)
    assert (cut.kind, cut.what, cut.lasted_s) == ("cut", "p1 -> d1", None)
    assert (restored.kind, restored.what, restored.lasted_s) == ("restored", "p1 -> d1", 30)


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
    (_, first) = events.newest(2)
    found = [
        is_during(first, Record(request_id="", route="", at_s=at, began_s=0, duration_s=4)) for at in SEEN
    ]
    assert found == [False, True, True, False]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (Capacity(2, 9, 3, 6), ("decode", "2 running, 7 waiting")),
        (Capacity(8, 3, 8, 6), ("prefill", "3 running, 6 waiting")),
    ],
)
@jumping
async def test_a_refusal_names_the_pool_and_its_load(capacity: Capacity, expected: tuple[str, str]) -> None:
    full: list[tuple[str, str]] = []
    admission = Admission(lambda _: capacity, Metrics(), on_full=lambda *seen: full.append(seen))
    tasks = [asyncio.create_task(admission.enter(request(600), "a")) for _ in range(9)]
    await asyncio.sleep(0.5)  # virtual time
    assert not full
    with pytest.raises(Overloaded) as refused:
        await admission.enter(request(600), "a")
    pool, load = expected
    wait_s = math.ceil(refused.value.retry_after_s or 0)
    assert refused.value.message == f"All {pool} workers are busy ({load}). Retry in {wait_s} s."
    assert full == [expected]
    await asyncio.sleep(1)  # virtual time
    assert (set(full), len(full)) == ({expected}, 7), "the others wait for a second"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_the_newest_events_are_kept() -> None:
    events = Events()
    for number in range(1000):
        events.add("left", f"d{number}")
    assert [event.what for event in events.newest(2)] == ["d999", "d998"]
    kept = events.newest(1000)
    assert len(kept) == 200
    assert msgspec.json.decode(msgspec.json.encode(kept), type=list[FleetEvent]) == kept


def test_a_value_cannot_end_a_line_or_begin_a_field() -> None:
    line = Line("worker lost", worker="d1", detail='a\nb c="d"\x1b\u2028', num=3)
    assert str(line) == 'worker lost worker=d1 detail="a\\nb c=\\"d\\"\\u001b\\u2028" num=3'
