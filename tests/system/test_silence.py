"""Workers that stand still or are cut off: noticed soon, and no answer changes."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.answers import Stream, num_attempts, read_all, whole_answer
from tests.stack import Stack
from tests.waiting import FAILOVER_S, wait_for


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two workers of each role, with the default liveness."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        del stack.environ["BATON_LIVENESS_S"]
        stack.serve("prefill", "prefill", "decode", "decode")
        yield stack


def first_token_s(stack: Stack, prompt: str) -> float:
    began_s = time.monotonic()
    Stream(stack, prompt=prompt).read(1)
    return time.monotonic() - began_s


def test_a_frozen_decode_worker_is_noticed(stack: Stack) -> None:
    frozen = next(process for process in stack.processes if process.name.startswith("decode"))
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(4)]  # round-robin: two on each

    frozen.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        firsts = [pool.submit(first_token_s, stack, prompt) for prompt in ("four five", "six seven")]
        assert read_all(streams, expected) < FAILOVER_S
        assert max(first.result() for first in firsts) < FAILOVER_S

    assert len(stack.health()["lost"]) == 1
    frozen.signal(signal.SIGCONT)
    stack.wait_ready(2, 2)
    stack.wait_idle()


def test_a_frozen_prefill_worker_is_noticed(stack: Stack) -> None:
    frozen = next(process for process in stack.processes if process.name.startswith("prefill"))

    frozen.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        firsts = [pool.submit(first_token_s, stack, f"prompt {i}") for i in range(4)]
        assert max(first.result() for first in firsts) < FAILOVER_S

    assert len(stack.health()["lost"]) == 1
    assert num_attempts(stack, "the next one") == 1
    frozen.signal(signal.SIGCONT)
    stack.wait_ready(2, 2)


def test_when_all_decode_workers_stand_still_their_streams_wait_for_them(stack: Stack) -> None:
    frozen = [process for process in stack.processes if process.name.startswith("decode")]
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(4)]

    for process in frozen:
        process.signal(signal.SIGSTOP)
    wait_for(lambda: len(stack.health()["lost"]) == 2)
    for process in frozen:
        process.signal(signal.SIGCONT)
    read_all(streams, expected)

    stack.wait_ready(2, 2)
    stack.wait_idle()
