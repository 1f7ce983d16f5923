"""One request's attempts: which failures count, and what it ends with."""

import asyncio
from collections.abc import Callable

import pytest

from baton.errors import BrokerLost, NoWorkers, Overloaded, WorkerLost, WorkerUnreached
from frontend.routing.progress import MAX_ATTEMPTS, Progress
from tests.scripted_workers import request, worker


def with_progress(check: Callable[[Progress], None]) -> None:
    async def main() -> None:
        check(Progress(request(600), 100))

    asyncio.run(main())


def fail(progress: Progress, error: Overloaded | WorkerLost | BrokerLost, num: int) -> None:
    for i in range(num):
        progress.asked.append(worker(f"d{i}"))
        progress.note_failure(error)


@pytest.mark.parametrize("error", [Overloaded("full"), WorkerLost("gone")])
def test_a_new_request_is_tried_on_four_workers(error: Overloaded | WorkerLost) -> None:
    def check(progress: Progress) -> None:
        fail(progress, error, MAX_ATTEMPTS - 1)
        with pytest.raises(type(error)):
            fail(progress, error, 1)

    with_progress(check)


def test_a_worker_that_was_gone_before_counts_for_nothing_but_is_avoided() -> None:
    def check(progress: Progress) -> None:
        fail(progress, WorkerUnreached("gone"), 3 * MAX_ATTEMPTS)
        assert len(progress.avoided) == 3 * MAX_ATTEMPTS
        fail(progress, WorkerLost("gone"), MAX_ATTEMPTS - 1)
        with pytest.raises(WorkerLost):
            fail(progress, WorkerLost("gone"), 1)

    with_progress(check)


def test_another_attempt_says_that_it_is_one() -> None:
    def check(progress: Progress) -> None:
        assert not progress.remaining().is_retry
        fail(progress, WorkerLost("gone"), 1)
        assert progress.remaining().is_retry

    with_progress(check)


def test_only_tokens_since_the_last_failure_excuse_the_next() -> None:
    def check(progress: Progress) -> None:
        progress.token_ids.extend(range(40))
        fail(progress, WorkerLost("gone"), MAX_ATTEMPTS - 1)
        with pytest.raises(WorkerLost):
            fail(progress, WorkerLost("gone"), 1)

    with_progress(check)


def test_who_waited_in_vain_learns_why_its_last_attempt_failed_unless_that_was_the_brokers_fault() -> None:
    def check(progress: Progress) -> None:
        assert progress.ended_by(absent := NoWorkers("none is live")) is absent
        fail(progress, lost := WorkerLost("gone"), 1)
        assert progress.ended_by(absent) is lost
        fail(progress, BrokerLost("away"), 1)
        assert progress.ended_by(absent) is absent

    with_progress(check)
