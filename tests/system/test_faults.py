"""Faults in real processes: every request ends with a result or a named error, and no KV stays pinned."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.answers import ENDLESS, Stream, read_all, whole_answer
from tests.stack import Stack, cluster
from tests.waiting import FAILOVER_S, wait_for

NO_WAIT = ("--wait-for-worker-s", "0")


def lost_by(stream: Stream) -> str:
    """The code of the error that ended it."""
    assert stream.error is not None
    return stream.error["code"]


@pytest.fixture
def planes(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "tcp and files":
        return {}
    return cluster(request.getfixturevalue("own_etcd"), request.getfixturevalue("nats_server"))


def mainly(planes: str) -> pytest.MarkDecorator:
    """On both kinds of planes, one of them among the slow tests: tests/chaos covers both as well."""
    both = ("tcp and files", "nats and etcd")
    marked = [pytest.param(each, marks=[pytest.mark.slow] if each != planes else []) for each in both]
    return pytest.mark.parametrize("planes", marked, indirect=True)


mainly_tcp, mainly_nats = mainly("tcp and files"), mainly("nats and etcd")


@pytest.fixture
def stack(tmp_path: Path, planes: dict[str, str]) -> Iterator[Stack]:
    with Stack(tmp_path, planes) as stack:
        yield stack


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@mainly_tcp
def test_a_lost_decode_worker_ends_its_streams_with_a_named_error(
    stack: Stack, number: signal.Signals
) -> None:
    _, decode = stack.serve("prefill", "decode", flags=NO_WAIT)
    streams = [Stream(stack, ENDLESS).read(3) for _ in range(4)]

    decode.signal(number)
    killed = time.monotonic()
    assert {lost_by(stream.read()) for stream in streams} == {"worker_lost"}
    assert time.monotonic() - killed < FAILOVER_S

    assert stack.get("/health").status_code == 503
    stack.worker("decode")
    stack.wait_ready(1, 1)
    whole_answer(stack, 5)


@mainly_nats
def test_a_stream_outlives_its_decode_worker_without_losing_a_token(stack: Stack) -> None:
    _, killed, _ = stack.serve("prefill", "decode", "decode")
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(2)]  # round-robin: one on each

    killed.kill()

    read_all(streams, expected)


@mainly_nats
def test_a_killed_prefill_worker_loses_no_answer(stack: Stack) -> None:
    _, *prefills = stack.serve("decode", "prefill", "prefill")
    expected = whole_answer(stack)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(whole_answer, stack) for _ in range(8)]
        prefills[0].kill()
        assert {answer.result() for answer in answers} == {expected}
    prefills[1].kill()

    assert whole_answer(stack) == expected


@mainly_nats
def test_a_drained_worker_finishes_what_it_holds_and_takes_nothing_new(stack: Stack) -> None:
    _, old = stack.serve("prefill", "decode")
    expected = whole_answer(stack, 400)
    stream = Stream(stack, 400).read(3)

    stack.worker("decode")
    stack.wait_ready(1, 2)
    old.signal(signal.SIGTERM)
    stack.wait_ready(1, 1)
    newer = Stream(stack, 400).read(1)

    assert stream.read().text == expected
    assert old.wait() == 0
    assert newer.read().text == expected


@mainly_tcp
def test_a_killed_frontend_leaves_nothing_running(stack: Stack) -> None:
    stack.serve("prefill", "decode")
    Stream(stack, ENDLESS).read(3)

    stack.processes[0].kill()
    stack.frontend("--request-timeout-s", "60")
    wait_for(lambda: stack.health() != {})

    stack.wait_idle()
