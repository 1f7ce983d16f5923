"""When a short prompt does not join those that wait at the prefill worker."""

from contextlib import suppress

from frontend.routing.generate import LocalPrefill
from tests.scripted_workers import worker
from tests.waiting import until

P1, P2 = worker("p1"), worker("p2")


async def test_the_oldest_wait_of_the_same_worker_counts() -> None:
    local = LocalPrefill(max_tokens=1, after_s=0.2)
    with local.waiting(P1):
        await until(lambda: local.is_due(P1))
        with local.waiting(P1):
            assert local.is_due(P1)
        assert local.is_due(P1)
        assert not local.is_due(P2)
    assert not local.is_due(P1)


async def test_the_wait_of_one_goes_on_when_anothers_ends() -> None:
    local = LocalPrefill(max_tokens=1, after_s=0.05)
    first, second = local.waiting(P1), local.waiting(P1)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    await until(lambda: local.is_due(P1))
    second.__exit__(None, None, None)
    assert not local._waits  # noqa: SLF001  it is only memory


def test_a_request_that_fails_waits_no_more() -> None:
    local = LocalPrefill(max_tokens=1)
    with suppress(ConnectionError), local.waiting(P1):
        raise ConnectionError
    assert not local._waits  # noqa: SLF001  it is only memory


def test_unless_it_is_asked_for_decode_prefills_nothing() -> None:
    assert LocalPrefill().max_tokens == 0


def test_without_a_limit_it_is_always_due() -> None:
    assert LocalPrefill(max_tokens=1).is_due(P1)
