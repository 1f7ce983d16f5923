"""Routing policies: pure, so each is a table."""

from collections import Counter

import msgspec
import pytest

from baton.messages import GenerateRequest, Role, Sampling, WorkerInfo
from frontend.routing.router import make_router


def worker(name: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        incarnation=name,
        role=Role.DECODE,
        endpoint="dyn://a.b.c",
        model="m",
        model_path="/m",
        address=f"tcp://{name}",
        context_length=10,
        engine="mocker",
        engine_version="1",
    )


REQUEST = GenerateRequest(
    request_id="r", model="m", token_ids=[1], sampling=Sampling(max_tokens=1, seed=0), deadline_s=1
)
WORKERS = [worker("a"), worker("b"), worker("c")]


def test_round_robin_takes_turns_for_each_role_and_model() -> None:
    pick = make_router("round-robin", {})

    decodes = [pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(4)]

    assert decodes == ["a", "b", "c", "a"]
    assert pick(Role.PREFILL, REQUEST, WORKERS).worker_id == "a"
    assert pick(Role.DECODE, msgspec.structs.replace(REQUEST, model="n"), WORKERS).worker_id == "a"


def test_round_robin_goes_on_when_the_fleet_shrinks() -> None:
    pick = make_router("round-robin", {})
    for _ in range(2):
        pick(Role.DECODE, REQUEST, WORKERS)

    assert pick(Role.DECODE, REQUEST, WORKERS[:1]).worker_id == "a"


def test_random_reaches_everybody() -> None:
    pick = make_router("random", {})

    picked = [pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(200)]
    assert set(picked) == {"a", "b", "c"}
    assert picked[:100] != picked[3:103]  # nobody's turn can be foretold


@pytest.mark.parametrize(
    ("running", "expected"),
    [({}, {"a", "b", "c"}), ({"a": 1}, {"b", "c"}), ({"a": 2, "b": 1, "c": 2}, {"b"})],
)
def test_least_loaded_takes_turns_among_the_least_busy(running: dict[str, int], expected: set[str]) -> None:
    pick = make_router("least-loaded", Counter(running))

    assert {pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(6)} == expected
