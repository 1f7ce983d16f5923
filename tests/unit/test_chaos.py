"""The chaos harness itself: its faults follow from the seed, and it notices what no stream should do."""

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice

import httpx
import pytest

from tests.chaos.load import Ask, Outcome, answered
from tests.chaos.schedule import Fault, Kind, faults, overlapping
from tests.chaos.scorecard import Episode, printed, scores
from tests.waiting import scaled

ASK = Ask(prompt="one", num_tokens=3, seed=1)
KINDS = tuple(Kind(name=name, targets=(("a",), ("b",)), hold_s=(0.0, 9.0)) for name in "xyz")


def data(text: str, finish_reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'text': text, 'finish_reason': finish_reason}]})}\n\n"


WHOLE = [data("1 "), data("2 "), data("3", "length"), "data: [DONE]\n\n"]


@contextmanager
def serving(*answers: list[str], after: Sequence[str | None] = (None,)) -> Iterator[str]:
    """A server that answers each request with the next events, if its Last-Event-ID is as in `after`; its
    URL."""
    coming = deque(zip(answers, after, strict=True))

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            events, last = coming.popleft()
            self.send_response(200 if self.headers["last-event-id"] == last else 400)
            self.end_headers()
            self.wfile.write("".join(events).encode())

        def log_message(self, *_: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:

        def handle() -> None:
            for _ in answers:
                server.handle_request()

        thread = threading.Thread(target=handle)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join()


def outcome_of(events: list[str]) -> Outcome:
    with serving(events) as url, httpx.Client(verify=False) as client:
        outcome = answered(client, url, ASK, threading.Event())
    outcome.judge("1 2 3")
    return outcome


def episode(outcome: Outcome, *, problem: str = "") -> Episode:
    target = ("decode-1",)
    fault = Fault(kind="kill", targets=target, pause_s=0.0, hold_s=1.0, cuts=False, gap_s=2.0)
    return Episode(
        plane="tcp+files",
        engine="mocker",
        seed=1,
        number=0,
        fault=fault,
        proof="it is dead",
        problem=problem,
        has_recovered=True,
        outcomes=[outcome],
        orphans={},
    )


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (WHOLE, "exact"),
        (WHOLE[:2], "lost"),
        (WHOLE[:3], "lost"),
        ([*WHOLE[:2], 'data: {"error": {"code": "worker_lost"}}\n\n'], "lost"),
        ([WHOLE[0], *WHOLE[2:]], "different"),
        ([WHOLE[0], *WHOLE], "different"),
        ([data("2 ")], "different"),
    ],
    ids=["whole", "cut", "no last event", "error", "a token lost", "a token repeated", "cut, and wrong"],
)
def test_the_client_notices_how_a_stream_ends(events: list[str], end: str) -> None:
    assert outcome_of(events).end == end


def test_a_client_with_a_key_comes_back_for_the_rest() -> None:
    numbered = [event[:-1] + f"id: {i}\n\n" for i, event in enumerate(WHOLE[:3])]
    cut = [*numbered[:2], numbered[2].removesuffix("\n")]  # before the event's end
    answers, after = (cut, numbered[2:], ["data: [DONE]\n\n"]), (None, "1", "2")
    with serving(*answers, after=after) as url, httpx.Client(verify=False) as client:
        outcome = answered(client, url, ASK, threading.Event(), "key")
    outcome.judge("1 2 3")
    assert (outcome.end, outcome.num_resumed) == ("exact", 2)


def test_streams_that_end_otherwise_faults_without_effect_and_long_gaps_are_findings() -> None:
    exact = outcome_of(WHOLE)
    assert not episode(exact).findings
    for events in (WHOLE[:2], [data("2 ")]):
        assert len(episode(outcome_of(events)).findings) == 1
    episodes = [episode(exact), episode(exact, problem="NotEffectiveError: it lives")]
    row, _ = scores(episodes)
    assert (row["faults"], row["effective"], row["exact"]) == (2, 1, 2)
    assert "it lives" in printed(episodes)
    assert printed(episodes).endswith("findings: 1")
    exact.longest_gap_s = scaled(2.0) - 0.1
    assert not episode(exact).findings
    exact.longest_gap_s += 0.2
    assert "gap" in episode(exact).findings[0]


def test_a_seed_gives_the_same_faults_again_and_each_kind_once_a_round() -> None:
    first, again, other = (list(islice(faults(seed, KINDS), 6)) for seed in (7, 7, 8))
    assert first == again != other
    assert sorted(fault.kind for fault in first) == sorted("xxyyzz")
    assert sorted(fault.kind for fault in first[:3]) == ["x", "y", "z"]


def test_overlapping_faults_follow_from_the_seed_and_harm_different_processes() -> None:
    wires = Kind(name="cut", targets=(("a",), ("c",)), is_of_network=True)
    loss = Kind(name="loss", targets=(("network",),), is_of_network=True, cuts=True, gap_s=5.0)
    kinds = (*KINDS, wires, loss)

    pairs = list(islice(overlapping(7, kinds), 60))

    assert pairs == list(islice(overlapping(7, kinds), 60))
    assert pairs != list(islice(overlapping(8, kinds), 60))
    for first in pairs:
        second = first.other
        assert second is not None
        assert not set(first.targets) & set(second.targets)
        assert first.kind != second.kind
        assert {first.kind, second.kind} != {"cut", "loss"}
        assert first.cuts == ("loss" in {first.kind, second.kind})
        assert first.gap_s == (8.5 if first.cuts else 7.0)
    assert {pair.row for pair in pairs} >= {"loss and x", "cut and y", "x and z"}
