"""Faults in real processes: every request ends with a result or a named error, and no KV stays pinned."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.answers import ENDLESS, Stream, whole_answer
from tests.stack import MODEL, Stack
from tests.waiting import scaled, wait_for


@pytest.fixture(params=["tcp and files", "nats and etcd"])
def planes(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "tcp and files":
        return {}
    etcd, nats = request.getfixturevalue("own_etcd"), request.getfixturevalue("nats_server")
    return {
        "BATON_DISCOVERY_BACKEND": "etcd",
        "BATON_REQUEST_PLANE": "nats",
        "ETCD_ENDPOINTS": etcd,
        "NATS_SERVER": nats,
    }


@pytest.fixture
def stack(tmp_path: Path, planes: dict[str, str]) -> Iterator[Stack]:
    stack = Stack(tmp_path, planes)
    yield stack
    stack.stop()


def test_a_client_that_leaves_frees_both_sides(stack: Stack) -> None:
    stack.frontend(), stack.worker("prefill"), stack.worker("decode")
    stack.wait_ready(1, 1)

    stream = Stream(stack, ENDLESS).read(3)
    assert stack.gauge("baton_num_running") >= 1
    stream.close()

    stack.wait_idle(5)


def test_a_killed_decode_worker_ends_its_streams_with_a_named_error_within_a_second(stack: Stack) -> None:
    stack.frontend("--wait-for-worker-s", "0"), stack.worker("prefill")
    decode = stack.worker("decode")
    stack.wait_ready(1, 1)
    streams = [Stream(stack, ENDLESS).read(3) for _ in range(4)]

    decode.kill()
    killed = time.monotonic()
    for stream in streams:
        stream.read()
        assert stream.error is not None
        assert stream.error["code"] == "worker_lost"
    assert time.monotonic() - killed < scaled(1.0)

    assert httpx.get(f"{stack.url}/health").status_code == 503
    stack.worker("decode")
    stack.wait_ready(1, 1)
    whole_answer(stack, 5)


def test_a_stream_outlives_its_decode_worker_without_losing_a_token(stack: Stack) -> None:
    stack.frontend(), stack.worker("prefill")
    killed, _ = stack.worker("decode"), stack.worker("decode")
    stack.wait_ready(1, 2)
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(2)]  # round-robin: one on each

    killed.kill()

    for stream in streams:
        stream.read()
        assert (stream.text, stream.finish_reason, stream.error) == (expected, "length", None)


def test_a_killed_prefill_worker_loses_no_answer(stack: Stack) -> None:
    stack.frontend(), stack.worker("decode")
    prefills = [stack.worker("prefill"), stack.worker("prefill")]
    stack.wait_ready(2, 1)
    expected = whole_answer(stack)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(whole_answer, stack) for _ in range(8)]
        prefills[0].kill()
        assert {answer.result() for answer in answers} == {expected}
    prefills[1].kill()

    assert whole_answer(stack) == expected


def test_a_frozen_decode_worker_is_given_up(stack: Stack) -> None:
    stack.frontend("--wait-for-worker-s", "0"), stack.worker("prefill")
    frozen = stack.worker("decode")
    stack.wait_ready(1, 1)

    stream = Stream(stack, ENDLESS).read(3)
    frozen.signal(signal.SIGSTOP)
    began = time.monotonic()
    stream.read()

    assert stream.error is not None
    assert stream.error["code"] == "worker_lost"
    assert time.monotonic() - began < scaled(15)


def test_a_drained_worker_finishes_what_it_holds_and_takes_nothing_new(stack: Stack) -> None:
    stack.frontend(), stack.worker("prefill")
    old = stack.worker("decode")
    stack.wait_ready(1, 1)
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


def test_a_drained_prefill_worker_waits_for_its_handoffs(stack: Stack) -> None:
    stack.frontend(), stack.worker("decode")
    prefill = stack.worker("prefill")
    stack.wait_ready(1, 1)
    whole_answer(stack, 5)

    prefill.signal(signal.SIGTERM)

    assert prefill.wait() == 0
    whole_answer(stack, 5)


def test_a_drained_frontend_finishes_its_streams(stack: Stack) -> None:
    frontend = stack.frontend()
    stack.worker("prefill"), stack.worker("decode")
    stack.wait_ready(1, 1)
    expected = whole_answer(stack)
    stream = Stream(stack).read(3)

    frontend.signal(signal.SIGTERM)

    assert stream.read().text == expected
    assert stream.done
    assert frontend.wait() == 0


def test_a_killed_frontend_leaves_nothing_running(stack: Stack) -> None:
    frontend = stack.frontend()
    stack.worker("prefill"), stack.worker("decode")
    stack.wait_ready(1, 1)
    Stream(stack, ENDLESS).read(3)

    frontend.kill()
    stack.frontend("--request-timeout-s", "60")
    wait_for(lambda: stack.health() != {})

    stack.wait_idle(15)


def test_without_a_decode_worker_the_503_says_what_is_missing(stack: Stack) -> None:
    stack.frontend(), stack.worker("prefill")
    stack.wait_ready(1, 0)

    health = httpx.get(f"{stack.url}/health")
    answer = httpx.post(f"{stack.url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})

    assert (health.status_code, health.json()["missing"]) == (503, [f"{MODEL}: decode"])
    assert answer.status_code == 503
    assert "decode" in answer.json()["error"]["message"]
