"""What is recorded of requests: stages that add up, attempts, and which records are kept."""

import math
import time
import tracemalloc
from types import SimpleNamespace
from typing import Literal, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages import KvHandoff, Role, TokenChunk, Usage
from frontend.record import MAX_BYTES, STAGES, Leg, Record, Records, Stage
from tests.planes import HANDOFF
from tests.registry import worker

P1 = worker("p1")
D1 = msgspec.structs.replace(P1, worker_id="d1", role=Role.DECODE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`s` is the time."""
    clock = SimpleNamespace(s=50.0)
    for name in ("perf_counter", "time"):
        monkeypatch.setattr(time, name, lambda: clock.s)
    return clock


def handoff(waited_s: float, computed_s: float) -> KvHandoff:
    return msgspec.structs.replace(HANDOFF, waited_s=waited_s, computed_s=computed_s)


def first_chunk(waited_s: float = 0.0, moved_s: float = 0.0, computed_s: float = 0.0) -> TokenChunk:
    return TokenChunk((1,), None, Usage(1, 0, 1, 8, waited_s, moved_s, computed_s, 0.5))


def disaggregated(leg: Leg, clock: SimpleNamespace, prefill_s: float = 2.0, decode_s: float = 1.0) -> None:
    """An attempt of which the workers account for 1.25 and 0.75 s."""
    leg.on(P1)
    clock.s += prefill_s
    leg.answered(handoff(0.25, 1.0))
    leg.on(D1)
    clock.s += decode_s
    leg.answered(first_chunk(0.5, 0.25))


Step = Literal["retry", "prefill", "decode", "decode only", "no reply", "blocked", "lost"]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(get_args(Step)), st.integers(0, 9)), max_size=60),
        min_size=1,
        max_size=3,
    )
)
def test_stages_add_up_whatever_happens(choices: list[list[tuple[Step, int]]]) -> None:
    clock = SimpleNamespace(s=50.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: clock.s)
        records = Records()
        record = records.begin("/v1/x", "r")
        record.enter("render")
        clock.s += 1
        legs = []
        for _ in choices:
            legs.append(record.leg())
            clock.s += 1  # the loop has other work
        for leg, steps in zip(legs, choices, strict=True):
            for step, lasted_s in steps:
                clock.s += lasted_s
                take(leg, step, lasted_s)
            assert sum(record.spent().values()) == clock.s - 50  # as they run until now
        record.generated()
        clock.s += 1
        spent = record.spent()
        records.end(record)
        assert sum(spent.values()) == clock.s - 50 == record.duration_s
        assert min(spent.values()) >= 0


def take(leg: Leg, step: Step, lasted_s: float) -> None:
    """One step of a choice, where it can come."""
    stage = leg.attempts[-1].stage
    match step:
        case "retry" | "decode only" if stage == "queue":
            leg.on(P1 if step == "retry" else D1)
        case "prefill" if stage == "prefill":
            leg.answered(handoff(lasted_s, 1.0))
            leg.on(D1)
        case "decode" | "no reply" if stage not in {"queue", "stream"}:
            leg.answered(first_chunk(1.0, lasted_s) if step == "decode" else None)
        case "blocked" if stage != "queue":
            leg.blocked(lasted_s * 2)
        case "lost" if stage != "queue":
            leg.failed("worker_lost")


def test_a_request_is_in_the_stages_of_its_choices() -> None:
    record = Records().begin("/v1/x", "r")
    record.enter("render")
    assert record.running == ["render"]
    waiting, prefilling, decoding = (record.leg() for _ in range(3))
    for leg in (prefilling, decoding):
        leg.on(P1)
    decoding.answered(handoff(0, 0))
    assert sorted(record.running) == ["decode_wait", "prefill", "queue"]
    decoding.answered(first_chunk())
    waiting.end()
    assert sorted(record.running) == ["prefill", "stream"]
    assert record.so_far().now in {"prefill", "stream"}
    record.end()
    assert record.running == []


def test_what_a_choice_waits_for_now_counts(clock: SimpleNamespace) -> None:
    record = Records().begin("/v1/x", "r")
    leg = record.leg()
    disaggregated(leg, clock)
    now_ns = int(clock.s * 1e9)
    leg.progress = [7, now_ns, now_ns]
    clock.s += 2
    silent = record.so_far()
    assert (silent.gap_s, silent.legs[0].gap_at, silent.num_completion_tokens) == (2, 7, 7)
    leg.progress[2] -= 1
    unread = record.so_far()
    assert (unread.gap_s, unread.spent()["send"], unread.spent()["stream"]) == (0, 2, 0)


def test_the_stages_add_up_to_the_duration(clock: SimpleNamespace) -> None:
    records = Records()
    record = records.begin("/v1/x", "r")
    stages: tuple[Stage, ...] = ("read", "render", "read")
    for stage in stages:
        record.enter(stage)
        clock.s += 1
    leg = record.leg()
    clock.s += 3
    disaggregated(leg, clock)
    clock.s += 4
    leg.failed("worker_lost")
    clock.s += 5
    disaggregated(leg, clock)
    clock.s += 6
    leg.blocked(2)
    assert sum(record.spent().values()) == pytest.approx(clock.s - 50)
    leg.end(Usage(1, 0, 9, 8, delay_s=0.75))
    record.enter("send")
    clock.s += 7
    records.end(record)
    spent: dict[Stage, float] = {
        "read": 2, "render": 1, "queue": 8, "prefill_wait": 0.5, "prefill": 2, "decode_wait": 1,
        "kv_move": 0.5, "transit": 2, "stream": 8, "send": 9,
    }  # fmt: skip
    (kept,) = records.newest(9)
    assert kept.spent() == pytest.approx(spent)
    assert list(kept.spent()) == list(STAGES)
    assert sum(spent.values()) == kept.duration_s
    first, second = kept.legs[0].attempts
    assert (first.outcome, second.outcome) == ("worker_lost", "")
    assert (first.stages["stream"], second.stages["send"]) == (4, 2)
    assert (second.prefill, second.decode, second.delay_s) == ("p1", "d1", 0.75)
    assert kept.legs[0].num_moved_bytes == 8
    assert len(kept.attempts) == 2


@pytest.mark.parametrize("lie_s", [1e9, math.inf, math.nan, -5.0])
def test_no_worker_accounts_for_more_than_there_was(clock: SimpleNamespace, lie_s: float) -> None:
    record = Records().begin("/v1/x", "r")
    leg = record.leg()
    leg.on(P1)
    clock.s += 2
    leg.answered(handoff(lie_s, lie_s))
    clock.s += 1
    leg.answered(first_chunk(lie_s, lie_s, lie_s))
    leg.end()
    spent = record.spent()
    assert sum(spent.values()) == pytest.approx(3)
    assert min(spent.values()) >= 0


@pytest.mark.parametrize(("prefill_s", "decode_s", "late"), [(2.0, 0.76, "p1"), (1.26, 3.0, "d1")])
def test_the_longer_transit_is_of_the_worker_whose_answer_was_late(
    clock: SimpleNamespace, prefill_s: float, decode_s: float, late: str
) -> None:
    leg = Leg.since(time.perf_counter())
    disaggregated(leg, clock, prefill_s, decode_s)
    (attempt,) = leg.attempts
    assert attempt.worker("transit") == late
    assert (attempt.worker("prefill"), attempt.worker("kv_move")) == ("p1", "d1")


@pytest.mark.parametrize("role", Role)
def test_without_a_handoff_one_worker_has_waited_and_computed(clock: SimpleNamespace, role: Role) -> None:
    leg = Leg.since(time.perf_counter())
    leg.on(msgspec.structs.replace(P1, worker_id="w", role=role))
    clock.s += 4
    leg.answered(first_chunk(1, 0, 2))
    wait: Stage = "prefill_wait" if role is Role.PREFILL else "decode_wait"
    (attempt,) = leg.attempts
    assert attempt.stages == {"queue": 0, wait: 1, "prefill": 2, "transit": 1}
    assert {attempt.worker(stage) for stage in attempt.stages} == {"", "w"}


def test_of_many_attempts_the_first_and_the_latest_are_kept(clock: SimpleNamespace) -> None:
    record = Records().begin("/v1/x", "r")
    leg = record.leg()
    for number in range(1000):
        leg.on(P1)
        clock.s += 1
        leg.failed(str(number))
    assert [attempt.outcome for attempt in leg.attempts[:2] + leg.attempts[-2:]] == ["0", "970", "999", ""]
    assert len(leg.attempts) == 32
    assert sum(record.spent().values()) == 1000


def ended(records: Records, request_id: str, at_s: float = 0, status: int = 200, num_legs: int = 1) -> Record:
    record = records.begin("/v1/chat/completions", request_id)
    record.at_s, record.status, record.model = at_s, status, "openai/gpt-oss-120b"
    for _ in range(num_legs):
        leg = record.leg()
        leg.on(P1)
        leg.answered(handoff(1e-9, 1e-9))
        leg.answered(first_chunk(1e-9, 1e-9))
        leg.end(Usage(1, 0, 1))
    records.end(record)
    return record


@pytest.mark.parametrize("num_legs", [1, 128])
def test_what_is_kept_is_bounded_in_bytes(num_legs: int) -> None:
    records = Records()
    record = ended(records, "a" * 500, status=500, num_legs=num_legs)
    tracemalloc.start()
    try:
        for _ in range(30_000 // num_legs):  # three times what fits
            records.end(msgspec.structs.replace(record))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert MAX_BYTES / 3 < num_bytes < MAX_BYTES
    assert len(records.slowest(999)) <= 200
    assert len(records.running()) == 0
    assert len(records.find("a" * 500, 999_999)) > len(records.find("a" * 500, 100)) == 100


@pytest.mark.parametrize("request_id", ["r", "\x00\x1b[31m\n", "ü" * 300, ""])
def test_all_requests_with_an_id_are_found_the_newest_first(request_id: str) -> None:
    records = Records()
    for at_s in range(3):
        ended(records, request_id, at_s, status=500)
    records.begin("/v1/x", request_id).at_s = 3
    ended(records, f"{request_id[:100]}+")
    found = records.find(request_id, 9)
    assert [record.at_s for record in found] == [3, 2, 1, 0]
    assert {record.request_id for record in found} == {request_id[:200]}
    assert [record.at_s for record in records.find(request_id, 2)] == [3, 2]


def test_the_slowest_of_the_last_hour_are_kept(clock: SimpleNamespace) -> None:
    records = Records()

    def one(request_id: str, lasted_s: float) -> None:
        record = records.begin("/v1/x", request_id)
        clock.s += lasted_s
        records.end(record)

    one("old", 1000)
    for number in range(300):
        one(str(number), 20 + number % 2)
    assert [record.request_id for record in records.slowest(2)] == ["299", "297"]
    assert {record.request_id for record in records.slowest(999)} > {str(n) for n in range(1, 300, 2)} - {
        str(n) for n in range(1, 130)
    }
    assert not records.newest(9, failed=True)
    record = records.begin("/v1/x", "again")
    record.leg().failed("worker_lost")
    records.end(record)
    assert [each.request_id for each in records.newest(9, failed=True)] == ["again"]
