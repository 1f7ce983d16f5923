"""Routing policies: pure, so each is a table."""

from collections import Counter

import msgspec
import pytest

from baton.messages import GenerateRequest, Role
from frontend.metrics import Metrics
from frontend.routing.admission import Router, RouterMode
from tests.requests import token_request
from tests.scripted_workers import worker

REQUEST = token_request([1], max_tokens=1, deadline_s=1)
WORKERS = [worker("a"), worker("b"), worker("c")]


def test_round_robin_takes_turns_for_each_role_and_model() -> None:
    pick = Router("round-robin", {}, Metrics()).pick
    decodes = [pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(4)]
    assert decodes == ["a", "b", "c", "a"]
    assert pick(Role.PREFILL, REQUEST, WORKERS).worker_id == "a"
    assert pick(Role.DECODE, msgspec.structs.replace(REQUEST, model="n"), WORKERS).worker_id == "a"


@pytest.mark.parametrize("mode", ["round-robin", "random", "least-loaded"])
def test_no_request_queues_at_one_worker_while_another_has_a_free_place(mode: RouterMode) -> None:
    workers = [msgspec.structs.replace(w, max_batch_size=2 * (i + 1)) for i, w in enumerate(WORKERS)]
    running: Counter[str] = Counter(a=2, b=4, c=1)
    pick = Router(mode, running, Metrics()).pick
    for _ in range(5):
        chosen = pick(Role.DECODE, REQUEST, workers).worker_id
        assert chosen == "c"
        running[chosen] += 1
    assert {pick(Role.DECODE, REQUEST, workers).worker_id for _ in range(100)} >= {"a"}  # all are full


def test_random_reaches_everybody() -> None:
    pick = Router("random", {}, Metrics()).pick
    picked = [pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(200)]
    assert set(picked) == {"a", "b", "c"}
    assert picked[:100] != picked[3:103]  # no turn is predictable


@pytest.mark.parametrize(
    ("running", "expected"),
    [({}, {"a", "b", "c"}), ({"a": 1}, {"b", "c"}), ({"a": 2, "b": 1, "c": 2}, {"b"})],
)
def test_least_loaded_takes_turns_among_the_least_busy(running: dict[str, int], expected: set[str]) -> None:
    pick = Router("least-loaded", Counter(running), Metrics()).pick
    assert {pick(Role.DECODE, REQUEST, WORKERS).worker_id for _ in range(6)} == expected


def conversation(first: int, num_turns: int = 1, salt: str = "") -> GenerateRequest:
    opening = [5] * 40 + [first]
    return msgspec.structs.replace(
        REQUEST,
        token_ids=opening + list(range(num_turns * 7)),
        num_opening_tokens=len(opening),
        cache_salt=salt,
    )


def test_every_turn_of_a_conversation_goes_to_the_same_worker_of_each_role() -> None:
    picks = [Router("prefix", {}, Metrics()).pick for _ in range(2)]  # of two frontends
    for first in range(20):
        for role in Role:
            chosen = {
                p(role, conversation(first, turn), WORKERS).worker_id for turn in range(5) for p in picks
            }
            assert len(chosen) == 1


def test_conversations_and_tenants_are_spread() -> None:
    pick = Router("prefix", {}, Metrics()).pick
    by_first = Counter(pick(Role.DECODE, conversation(first), WORKERS).worker_id for first in range(300))
    by_salt = Counter(pick(Role.DECODE, conversation(1, 1, f"{i}"), WORKERS).worker_id for i in range(300))
    for counts in (by_first, by_salt):
        assert min(counts[name] for name in "abc") > 50


def test_a_worker_less_or_started_again_moves_its_own_conversations_only() -> None:
    pick = Router("prefix", {}, Metrics()).pick
    again = [msgspec.structs.replace(WORKERS[0], incarnation="a.2"), *WORKERS[1:]]  # its cache is gone
    moved = set()
    for first in range(50):
        before, less, after = (
            pick(Role.DECODE, conversation(first), workers).worker_id
            for workers in (WORKERS, WORKERS[1:], again)
        )
        assert before in {"a", less}
        assert before == after or "a" in {before, after}
        moved.add(before != after)
    assert moved == {True, False}


def test_a_worker_with_more_than_its_share_is_passed_over() -> None:
    own = Router("prefix", {}, Metrics()).pick(Role.DECODE, conversation(1), WORKERS).worker_id
    metrics = Metrics()
    for num_running, is_own in ((0, True), (1, True), (2, True), (3, False), (30, False)):
        running = {name: num_running if name == own else 1 for name in "abc"}
        pick = Router("prefix", running, metrics).pick
        picked = pick(Role.DECODE, conversation(1), WORKERS).worker_id
        assert (picked == own) == is_own
    counted = [metrics.of("prefix_routes", "decode", place).value for place in ("own", "other")]
    assert counted == [3, 2]
