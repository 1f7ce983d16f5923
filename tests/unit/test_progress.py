"""One request's attempts: which failures count, and what it ends with."""

import pytest

from baton.errors import (
    BatonError,
    BrokerLost,
    HandoffFailed,
    NotResumable,
    NoWorkers,
    WorkerLost,
    WorkerUnreached,
)
from baton.messages import TokenChunk
from frontend.routing.progress import MAX_ATTEMPTS, Progress
from tests.scripted_workers import request, worker


@pytest.fixture
async def progress() -> Progress:
    return Progress(request(600), 100)


def fail(progress: Progress, error: BatonError, num: int = 1) -> None:
    for i in range(num):
        progress.called.append(worker(f"d{i}"))
        progress.note_failure(error)


async def test_a_worker_that_was_gone_before_counts_for_nothing_but_is_avoided(progress: Progress) -> None:
    fail(progress, WorkerUnreached("gone"), 3 * MAX_ATTEMPTS)
    assert len(progress.avoided) == 3 * MAX_ATTEMPTS
    fail(progress, WorkerLost("gone"), MAX_ATTEMPTS - 1)
    with pytest.raises(WorkerLost):
        fail(progress, WorkerLost("gone"), 1)


async def test_only_tokens_since_the_last_failure_excuse_the_next(progress: Progress) -> None:
    progress.token_ids.extend(range(40))
    fail(progress, WorkerLost("gone"), MAX_ATTEMPTS - 1)
    with pytest.raises(WorkerLost):
        fail(progress, WorkerLost("gone"), 1)


async def test_a_wait_that_times_out_ends_with_the_last_error_unless_the_broker_was_away(
    progress: Progress,
) -> None:
    assert progress.ended_by(absent := NoWorkers("none is live")) is absent
    fail(progress, lost := WorkerLost("gone"), 1)
    assert progress.ended_by(absent) is lost
    fail(progress, BrokerLost("away"), 1)
    assert progress.ended_by(absent) is absent


@pytest.mark.parametrize(
    ("error", "num"), [(BrokerLost("away"), 9), (NoWorkers("none"), 9), (NotResumable("no"), 1)]
)
async def test_errors_that_no_worker_caused_count_for_nothing(
    progress: Progress, error: BatonError, num: int
) -> None:
    fail(progress, error, num)
    assert not progress.avoided
    fail(progress, WorkerLost("gone"), MAX_ATTEMPTS - 1)
    with pytest.raises(WorkerLost):
        fail(progress, WorkerLost("gone"))


async def test_a_failed_handoff_excludes_its_prefill_worker_or_else_decode(progress: Progress) -> None:
    progress.prefill = worker("p1")
    fail(progress, HandoffFailed("expired"))
    assert progress.avoided == {"p1.1"}
    assert progress.lost_with(WorkerLost("gone")) is None, "no worker is called yet"
    fail(progress, HandoffFailed("of no one"))
    assert progress.avoided == {"p1.1", "d0.1"}


async def test_an_answer_made_again_may_end_with_the_last_token_that_is_known(progress: Progress) -> None:
    progress.take(TokenChunk((10, 11)))
    fail(progress, WorkerLost("gone"))
    fail(progress, NotResumable("no"))
    assert progress.remaining().num_generated == 0
    assert progress.take(TokenChunk((10,))) is None
    last = progress.take(TokenChunk((11,), "stop"))
    assert last is not None
    assert (last.token_ids, last.finish_reason, progress.token_ids) == ((), "stop", [10, 11])
