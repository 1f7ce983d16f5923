"""What admission takes into account: who has a token, priorities, and how fast places become free."""

import asyncio

import pytest

from baton.errors import Overloaded
from frontend.metrics import Metrics
from frontend.routing.admission import Admission, Capacity
from tests.clock import jumping, run_jumping
from tests.scripted_workers import request


def admission_of(num_running: int, num_starting: float, num_waiting: int = 9) -> Admission:
    capacity = Capacity(num_running, num_starting, num_running, num_waiting)
    return Admission(lambda _: capacity, Metrics().routing)


async def hold(admission: Admission, lasts_s: float, priority: int = 0, deadline_s: float = 600) -> float:
    """When a request without a token was let in, which keeps its place for so long."""
    async with admission.place(request(deadline_s, priority), "a"):
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(lasts_s)
    return began_s


@jumping
async def test_the_capacity_is_asked_for_with_the_number_that_have_a_token() -> None:
    told: list[int] = []

    def capacity(num_with_token: int) -> None:
        told.append(num_with_token)

    admission = Admission(capacity, Metrics().routing)
    async with admission.place(request(), "a") as start, admission.place(request(), "a"):
        start()
        await asyncio.sleep(1)
        admission.check("a", 600)
    assert told[-1] == 1


def test_of_one_callers_requests_the_lower_priority_goes_first() -> None:
    async def main() -> tuple[float, ...]:
        admission = admission_of(1, 1)
        first = asyncio.create_task(hold(admission, 1))
        await asyncio.sleep(0)
        return tuple(
            await asyncio.gather(first, hold(admission, 1, priority=2), hold(admission, 1, priority=1))
        )

    assert run_jumping(main()) == pytest.approx((0, 2, 1))


@jumping
async def test_no_more_places_become_free_than_requests_run() -> None:
    admission = admission_of(10, 1)
    async with admission.place(request(600), "a") as start:
        start()
        await asyncio.sleep(10)  # how long requests last is known from here on
    running = [asyncio.create_task(hold(admission, 10)) for _ in range(2)]  # the second waits
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):  # it would wait for 10 s, and run for 10 s
        await hold(admission, 0, deadline_s=15)
    await asyncio.gather(*running)


@jumping
async def test_requests_that_take_no_time_leave_an_estimate() -> None:
    admission = admission_of(1, 1, num_waiting=0)
    async with admission.place(request(600), "a") as start:
        start()
    async with admission.place(request(600), "a"):
        waiting = [asyncio.create_task(hold(admission, 0)) for _ in range(3000)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await hold(admission, 0)
        assert 0 < (refused.value.retry_after_s or 0) < 5
    await asyncio.gather(*waiting, return_exceptions=True)


@jumping
async def test_a_caller_may_have_more_than_its_share_of_a_queue_that_is_not_full() -> None:
    admission = admission_of(num_running=1, num_starting=9, num_waiting=4)

    async def one(caller: str) -> None:
        async with admission.place(request(), caller):
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        for caller in ("a", "a", "a", "b"):  # one runs, three wait
            tasks.create_task(one(caller))
            await asyncio.sleep(0)
        admission.check("a", 600)
        tasks.create_task(one("a"))
        await asyncio.sleep(0)
        admission.check("b", 600)  # which has less than its share
        with pytest.raises(Overloaded):
            admission.check("a", 600)


@jumping
async def test_the_capacity_is_not_asked_for_more_than_ten_times_a_second() -> None:
    told: list[int] = []

    def capacity(num_with_token: int) -> Capacity:
        told.append(num_with_token)
        return Capacity(1, 1, 1, 1000)

    admission = Admission(capacity, Metrics().routing)
    for _ in range(100):
        admission.check("a", 600)
    await asyncio.sleep(1)
    admission.check("a", 600)
    assert len(told) == 2


@jumping
async def test_a_first_token_that_is_told_twice_counts_once() -> None:
    admission = admission_of(num_running=9, num_starting=1)
    async with admission.place(request(600), "a") as start:
        start()
        start()
        starting = [asyncio.create_task(hold(admission, 5)) for _ in range(2)]
        assert await asyncio.gather(*starting) == pytest.approx([0, 5])


def test_before_any_request_has_ended_a_second_is_assumed() -> None:
    async def main() -> float:
        admission = admission_of(num_running=1, num_starting=1, num_waiting=0)
        async with admission.place(request(600), "a"):
            waiting = [asyncio.create_task(hold(admission, 0)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as refused:
                await hold(admission, 0)
        await asyncio.gather(*waiting)
        return refused.value.retry_after_s or 0

    assert run_jumping(main()) == pytest.approx(1 + 1)


def test_one_long_request_changes_the_estimate_by_a_tenth() -> None:
    async def main() -> float:
        admission = admission_of(num_running=1, num_starting=1)
        for lasts_s in (10, 110):
            async with admission.place(request(600), "a") as start:
                start()
                await asyncio.sleep(lasts_s)
        with pytest.raises(Overloaded) as refused:
            async with admission.place(request(600), "a"):
                raise Overloaded("full")
        return refused.value.retry_after_s or 0

    assert run_jumping(main()) == pytest.approx(20)
