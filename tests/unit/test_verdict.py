"""What a record's stages say: the slow one, its worker, or none; also from the line of a log."""

import json
import logging

import pytest

from baton.telemetry import Formatter
from frontend.access import line_of
from frontend.record import STAGES, Attempt, Leg, Record, Stage
from frontend.verdict import Explained, Usual, Verdict, verdict
from operations.why import records_of, text

RECORD: list[Stage] = [stage for stage, rule in STAGES.items() if rule.group == "client"]
ATTEMPT: list[Stage] = [stage for stage in STAGES if stage not in RECORD]


def record(**stages: float) -> Record:
    """A request of 100 prompt tokens and 50 generated ones on p and d; stages are in seconds."""
    usual: dict[Stage, float] = {"prefill": 0.01, "kv_move": 0.002, "transit": 0.001, "stream": 0.5}
    attempt = Attempt(prefill="p", decode="d", stages=usual, late="p")
    leg = Leg(attempts=[attempt], gap_s=0.02, gap_at=3)
    made = Record(request_id="r", route="/v1/x", at_s=1e9, began_s=0.0, legs=[leg])
    made.stages = {"read": 0.001, "render": 0.002, "send": 0.001}
    made.num_prompt_tokens, made.num_completion_tokens = 100, 50
    for stage in RECORD:
        made.stages[stage] = stages.get(stage, made.stages[stage])
    for stage in ATTEMPT:
        attempt.stages[stage] = stages.get(stage, attempt.stages.get(stage, 0.0))
    leg.gap_s = stages.get("gap", leg.gap_s)
    made.delay_s = stages.get("delay", 0.0)
    made.duration_s = sum(made.spent().values())
    return made


USUAL = Usual(record() for _ in range(20))


def judged(made: Record, usual: Usual = USUAL) -> tuple[str, str, float] | None:
    found = verdict(made, usual)
    return None if found is None else (found.stage, found.worker, round(found.excess_s, 3))


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({}, None),
        ({"read": 0.24}, None),
        ({"transit": 0.3}, ("transit", "p", 0.299)),
        ({"gap": 0.35}, ("stream", "d", 0.33)),
        ({"transit": 0.4, "delay": 0.2}, None),
        ({"read": 0.801}, ("read", "", 0.8)),
        ({"render": 0.402}, ("render", "", 0.4)),
        ({"queue": 0.4}, ("queue", "", 0.4)),
        ({"queue": 0.4, "decode_wait": 1.0}, ("decode_wait", "d", 1.4)),
        ({"queue": 2.0, "prefill_wait": 1.0}, ("queue", "", 3.0)),
        ({"prefill": 0.91}, ("prefill", "p", 0.9)),
        ({"kv_move": 0.602}, ("kv_move", "d", 0.6)),
        ({"transit": 0.801}, ("transit", "p", 0.8)),
        ({"stream": 3.0}, ("stream", "d", 2.5)),
        ({"stream": 1.3, "gap": 0.82}, ("stream", "d", 0.8)),
        ({"send": 2.001}, ("send", "", 2.0)),
        ({"delay": 0.9}, ("stream", "", 0.9)),
        ({"stream": 1.5, "gap": 1.0, "delay": 0.9}, ("stream", "", 0.9)),
        ({"stream": 9.5, "gap": 9.0, "delay": 0.9}, ("stream", "d", 8.98)),
    ],
)
def test_the_slow_stage_is_the_one_most_out_of_line(
    stages: dict[str, float], expected: tuple[str, str, float] | None
) -> None:
    assert judged(record(**stages)) == expected


def refused(status: int, code: str, **stages: float) -> Record:
    made = record(**stages)
    made.status, made.code = status, code
    return made


def unsent(code: str) -> Record:
    made = refused(503, code)
    made.legs.clear()
    return made


def failed(code: str, stage: Stage, lasted_s: float, prefill: str = "", decode: str = "") -> Record:
    made = record()
    attempt = Attempt(outcome=code, ended_in=stage, stages={stage: lasted_s}, prefill=prefill, decode=decode)
    made.legs[0].attempts.insert(0, attempt)
    return made


@pytest.mark.parametrize(
    ("made", "expected", "cause"),
    [
        (failed("worker_lost", "prefill", 2.0, prefill="p2"), ("prefill", "p2", 2.0), "p2 was lost"),
        (failed("worker_lost", "decode_wait", 0.1, decode="d2"), ("decode_wait", "d2", 0.1), "d2 was lost"),
        (failed("handoff_stalled", "decode_wait", 2.0, prefill="p2", decode="d2"), ("kv_move", "p2", 2.0),
         "no KV came from p2 to d2"),
        (failed("broker_unavailable", "prefill", 3.0, prefill="p2"), ("prefill", "", 3.0),
         "NATS could not be reached"),
        (failed("new_code", "prefill", 1.0, prefill="p2"), ("prefill", "p2", 1.0), "p2 failed (new_code)"),
        (unsent("overloaded"), ("queue", "", 0.0), "all workers were busy"),
        (unsent("no_workers"), ("queue", "", 0.0), "no decode worker was live"),
    ],
)  # fmt: skip
def test_what_failed_is_out_of_line_however_short(
    made: Record, expected: tuple[str, str, float], cause: str
) -> None:
    found = verdict(made, USUAL)
    assert isinstance(found, Verdict)
    assert (judged(made), found.cause) == (expected, cause)


def test_who_computes_in_place_of_a_lost_worker_is_not_slow() -> None:
    made = failed("worker_lost", "prefill", 2.0, prefill="p2")
    made.legs[0].attempts[1] = Attempt(decode="d", stages={"prefill": 4.0})
    assert judged(made) == ("prefill", "p2", 2.0)


def test_what_failed_at_once_was_not_slow() -> None:
    made = unsent("overloaded")
    assert "failed stage: queue: all workers" in text(Explained(record=made, verdict=verdict(made, USUAL)))


def test_what_all_requests_have_is_usual_but_for_waits() -> None:
    slow = Usual(record(transit=0.9, decode_wait=0.9) for _ in range(20))
    assert judged(record(transit=1.0), slow) is None
    assert judged(record(decode_wait=0.9), slow) == ("decode_wait", "d", 0.9)
    failed = Usual(refused(500, "engine_failure", transit=0.9) for _ in range(20))
    assert judged(record(transit=1.0), failed) == ("transit", "p", 1.0)


def test_a_client_that_follows_a_long_background_response_was_not_slow() -> None:
    made = Record(request_id="r", route="/v1/responses", at_s=1e9, began_s=0.0, stages={"stream": 60.0})
    assert judged(made) is None


def test_on_a_busy_machine_less_is_out_of_line() -> None:
    busy = Usual(record(delay=0.2) for _ in range(20))
    assert judged(record(transit=0.5, delay=0.02), busy) is None
    assert judged(record(transit=0.6, delay=0.02), busy) == ("transit", "p", 0.599)
    assert judged(record(delay=0.55), busy) is None
    assert judged(record(prefill_wait=0.3), busy) == ("prefill_wait", "p", 0.3)
    made = record(read=0.4)
    made.cpu_wait_s = 0.15
    assert judged(made) is None


def test_a_gap_before_the_second_token_of_prefill_is_decodes_start() -> None:
    made = record(transit=0.8, gap=0.81)
    made.legs[0].gap_at = 1
    assert judged(made) == ("transit", "p", 0.799)


def test_a_worker_whose_loop_stood_still_did_not_compute() -> None:
    made = record(prefill=2.0)
    made.legs[0].attempts[0].delay_s = 1.9
    found = verdict(made, USUAL)
    assert found
    assert found.cause == "p stood still"


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(8000, None), (100, ("prefill", "p", 3.0))])
def test_a_prompt_that_is_being_computed_may_take_as_long_as_it_is(
    num_prompt_tokens: int, expected: tuple[str, str, float] | None
) -> None:
    made = Record(request_id="r", route="/v1/x", at_s=1e9, began_s=0.0, status=0)
    made.num_prompt_tokens = num_prompt_tokens
    prefill: dict[Stage, float] = {"prefill": 3.0}
    made.legs = [Leg(attempts=[Attempt(prefill="p", stages=prefill, ended_in="prefill")])]
    assert judged(made) == expected


@pytest.mark.parametrize(
    ("stages", "starved_s", "delay_s", "cpu_wait_s", "expected"),
    [
        ({"transit": 1.0}, 0.9, 0.0, 0.0, ("", "the host of p was busy")),
        ({"transit": 1.0}, 0.3, 0.0, 0.0, ("p", "p stood still, or the network to it")),
        ({"transit": 1.0}, 0.0, 0.0, 0.6, ("", "the host of this frontend was busy")),  # many short delays
        ({"transit": 1.0}, 0.0, 0.0, 0.2, ("p", "p stood still, or the network to it")),
        ({"transit": 1.0}, 0.0, 0.9, 0.6, ("p", "p stood still, or the network to it")),  # it was stopped
        ({"read": 0.9}, 0.0, 0.0, 0.6, ("", "the host of this frontend was busy")),
        ({"read": 0.9}, 0.0, 0.0, 0.4, ("", "the client sent its body slowly")),
        ({"delay": 0.9}, 0.0, 0.0, 0.8, ("", "the host of this frontend was busy")),
        ({"queue": 1.0}, 0.9, 0.0, 0.0, ("", "the host of d was busy")),  # a process that took part
    ],
)
def test_a_process_without_a_cpu_is_not_the_cause(
    stages: dict[str, float], starved_s: float, delay_s: float, cpu_wait_s: float, expected: tuple[str, str]
) -> None:
    made = record(**stages)
    (attempt,) = made.legs[0].attempts
    attempt.starved_s, attempt.delay_s = starved_s, delay_s
    made.starved_s = made.cpu_wait_s = cpu_wait_s
    found = verdict(made, USUAL)
    assert found
    assert (found.worker, found.cause) == expected


def by(caller: str, **stages: float) -> Record:
    made = record(**stages)
    made.caller, made.first_token_s = caller, sum(stages.values())
    return made


def test_the_key_whose_requests_run_fills_the_workers_and_not_one_whose_requests_wait() -> None:
    recent = [*[by("hog", stream=20.0)] * 2, *[by("many", queue=20.0)] * 12, *[by("", queue=9.0)] * 9]
    waiting = [by("any", queue=9.0), by("any", decode_wait=9.0), by("", queue=9.0), by("hog", queue=9.0)]
    waiting += [unsent("overloaded"), unsent("no_workers")]
    for made in waiting:
        made.at_s += 5
    found = [verdict(made, Usual(recent)) for made in waiting]
    found.append(verdict(waiting[0], Usual(recent, since_s=1e9 + 6)))  # others may have ended before
    assert [each and each.crowd for each in found] == ["hog", "hog", "hog", "", "hog", "", ""]


def test_a_few_requests_of_an_incident_do_not_hide_the_next() -> None:
    usual = Usual([*(record() for _ in range(20)), *(record(transit=1.0) for _ in range(3))])
    assert judged(record(transit=1.0), usual) == ("transit", "p", 0.999)


@pytest.mark.parametrize("formatter", [Formatter("text"), Formatter("json")])
@pytest.mark.parametrize(
    "made",
    [
        record(),
        record(transit=0.8),
        record(stream=1.5, gap=1.0),
        record(stream=1.5, gap=1.0, delay=0.9),
        failed("worker_lost", "prefill", 2.0, prefill="p2"),
        refused(429, "overloaded", queue=3.0),
    ],
)
def test_a_line_of_the_log_gives_the_same_verdict(formatter: logging.Formatter, made: Record) -> None:
    made.request_id = "r-1"
    line = logging.makeLogRecord(
        {"msg": line_of(made), "levelname": "INFO", "name": "frontend.access", "created": 1e9}
    )
    noise = ["", "{", "[]", "{}", "\xff\x1b", "x" * 9999]
    noise.append("2026-01-01T00:00:00 INFO frontend.access request duration_s=x")
    noise.append('{"logger": "frontend.access", "message": "request"}')
    (again,) = records_of([*noise, formatter.format(line), json.dumps({"logger": "frontend.access"})])
    assert (again.request_id, again.status, again.code) == ("r-1", made.status, made.code)
    assert judged(again) == judged(made)
