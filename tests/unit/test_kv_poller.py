"""A thread that runs calls in order and polls only while there is work."""

import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.waiting import PATIENCE_S, wait_for
from workers.kv.poller import Poller


class Work:
    """Work that is done after some polls."""

    def __init__(self) -> None:
        self.num_left = 0
        self.num_polls = 0
        self.done = threading.Event()
        self.pause_s = 0.0

    def begin(self, num_polls: int) -> None:
        self.num_left = num_polls

    def poll(self) -> float | None:
        self.num_polls += 1
        if self.num_left == 0:
            return None
        self.num_left -= 1
        if self.num_left == 0:
            self.done.set()
        return self.pause_s


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def poller(work: Work) -> Iterator[Poller]:
    poller = Poller()
    poller.start("under-test", work.poll)
    yield poller
    poller.stop()


def test_calls_run_in_order_on_one_other_thread(poller: Poller) -> None:
    seen: list[tuple[int, int]] = []

    def note(number: int) -> None:
        seen.append((number, threading.get_ident()))

    for future in [poller.submit(note, number) for number in range(100)]:
        future.result(PATIENCE_S)
    assert [number for number, _ in seen] == list(range(100))
    assert {thread for _, thread in seen} != {threading.get_ident()}
    assert len({thread for _, thread in seen}) == 1


def test_a_call_that_raises_fails_its_own_future_only(poller: Poller) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        poller.submit(fail).result(PATIENCE_S)
    assert poller.submit(lambda: 7).result(PATIENCE_S) == 7


def test_it_polls_until_the_work_is_done_and_then_rests(poller: Poller, work: Work) -> None:
    poller.submit(work.begin, 50).result(PATIENCE_S)
    assert work.done.wait(PATIENCE_S)
    wait_for(lambda: work.num_polls == 51)
    poller.submit(lambda: None).result(PATIENCE_S)
    wait_for(lambda: work.num_polls == 52)  # one for the call, none in between


def test_it_rests_between_two_polls_for_as_long_as_the_poll_says(poller: Poller, work: Work) -> None:
    work.pause_s = 0.02
    began_s = time.monotonic()
    poller.submit(work.begin, 10).result(PATIENCE_S)
    assert work.done.wait(PATIENCE_S)
    assert time.monotonic() - began_s > 0.15


def test_a_call_that_was_cancelled_before_its_turn_is_not_run(poller: Poller) -> None:
    go_on = threading.Event()
    seen: list[str] = []
    poller.submit(go_on.wait, PATIENCE_S)
    unwanted = poller.submit(seen.append, "unwanted")
    wanted = poller.submit(seen.append, "wanted")
    assert unwanted.cancel()
    go_on.set()
    wanted.result(PATIENCE_S)
    assert seen == ["wanted"]


def test_a_calls_arguments_are_released_at_its_end(poller: Poller) -> None:
    class Payload:
        pass

    payload = Payload()
    there = weakref.ref(payload)
    poller.submit(lambda _: None, payload).result(PATIENCE_S)
    del payload
    wait_for(lambda: there() is None)


def test_stopping_runs_what_was_submitted_and_is_idempotent(work: Work) -> None:
    poller = Poller()
    poller.stop()
    poller.start("under-test", work.poll)
    (thread,) = [each for each in threading.enumerate() if each.name == "under-test"]
    assert thread.daemon  # a process that ends otherwise is not kept
    last = poller.submit(lambda: "ran")
    poller.stop()
    assert not thread.is_alive()
    poller.stop()
    assert last.result(0) == "ran"
