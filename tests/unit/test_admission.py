"""Requests run while the workers have room, wait in turn, or are refused with the time to come back."""

import asyncio
import math

import msgspec
import pytest

from baton.errors import Overloaded
from baton.messages import WorkerInfo
from frontend.metrics import Metrics
from frontend.routing.admission import MAX_WAIT_S, UNKNOWN, Admission, Capacity, capacity_of
from tests.clock import jumping
from tests.generators import running
from tests.scripted_workers import request, sampled, worker

Sizes = tuple[int | None, int]
"""(batch, queue)."""


def pool(name: str, *sizes: Sizes) -> list[WorkerInfo]:
    return [
        msgspec.structs.replace(worker(f"{name}{i}"), max_batch_size=batch, max_queue_size=queue)
        for i, (batch, queue) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("prefills", "decodes", "num_processes", "expected"),
    [
        # One in eight more than the batch is on its way to a place that becomes free; the queue waits here.
        ([], [(64, 100)], 1, Capacity(64, math.inf, 72, 92)),
        ([], [(64, 4)], 1, Capacity(64, math.inf, 68, 0)),
        ([], [(64, 0)], 1, Capacity(64, math.inf, 64, 0)),
        # Decode is kept busy while prefill has its own batch in work and one to go on with.
        ([(4, 8)], [(64, 100)], 1, Capacity(64, 8, 68, 8)),
        ([(4, 2)], [(32, 50), (32, 50)], 1, Capacity(64, 6, 68, 2)),
        # Processes share what workers hold, so that none is refused, but need not leave places empty.
        ([], [(8, 256)], 4, Capacity(2, math.inf, 9, 57)),
        ([(8, 8)], [(8, 8)], 4, Capacity(2, 4, 4, 0)),
        ([], [(2, 1)], 4, Capacity(1, math.inf, 1, 0)),
        ([(1, 0)], [(8, 8)], 4, Capacity(2, 1, 4, 0)),
        # Workers that do not announce what they hold refuse for themselves.
        ([], [(None, 0)], 1, UNKNOWN),
        ([], [(8, 8), (None, 0)], 1, UNKNOWN),
        ([(None, 0)], [(8, 8)], 1, Capacity(8, math.inf, 9, 7)),
        ([(8, 8)], [], 1, UNKNOWN),
    ],
)
def test_what_the_workers_hold_is_divided(
    prefills: list[Sizes], decodes: list[Sizes], num_processes: int, expected: Capacity
) -> None:
    assert capacity_of(pool("p", *prefills), pool("d", *decodes), num_processes) == expected


class Load:
    """Requests over one Admission, each running for `lasts_s`; records who started and ended when."""

    def __init__(
        self,
        *,
        num_running: int = 2,
        num_waiting: int = 4,
        num_starting: float = math.inf,
        lasts_s: float = 10,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.metrics = Metrics()
        self.capacity = Capacity(num_running, num_starting, num_running, num_waiting)
        self.admission = Admission(lambda _: self.capacity, self.metrics, max_wait_s)
        self.started: list[tuple[str, float]] = []
        self.lasts_s = lasts_s

    async def one(
        self, caller: str, deadline_s: float = 600, first_token_s: float = 0, priority: int = 0
    ) -> None:
        place = await self.admission.enter(request(deadline_s, priority), caller)
        try:
            self.started.append((caller, asyncio.get_running_loop().time()))
            await asyncio.sleep(first_token_s)
            self.admission.start(place)
            await asyncio.sleep(self.lasts_s - first_token_s)
        finally:
            self.admission.leave(place)

    async def refused(self, caller: str = "a", deadline_s: float = 600) -> float:
        """The Retry-After of a request, which is refused."""
        with pytest.raises(Overloaded) as refused:
            await self.one(caller, deadline_s)
        return refused.value.retry_after_s or 0.0

    def several(self, caller: str, num: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.one(caller)) for _ in range(num)]

    async def measured(self) -> None:
        """How long requests last is known from here on."""
        await self.one("warm-up")
        self.started.clear()

    def metric(self, name: str, **labels: str) -> float:
        value = sampled(self.metrics, name, **labels)
        return 0.0 if value is None else value


async def turn() -> None:
    await asyncio.sleep(0.001)


@pytest.mark.parametrize(("a", "b"), [("a", "b"), ("key\na", "key\nb")], ids=["keys", "users"])
@jumping
async def test_a_place_that_becomes_free_goes_to_the_next_caller_in_turn(a: str, b: str) -> None:
    load = Load(num_running=1, num_waiting=9)
    many = load.several(a, 4)
    await turn()
    few = load.several(b, 1)
    await turn()
    assert load.metric("baton_queued_requests") == 4
    assert load.admission.places() == {"prefill": (0, math.inf), "running": (1, 1), "queue": (4, 9)}
    assert [len(turns) for users in load.admission.waiting.values() for turns in users.values()] == [3, 1]
    await asyncio.gather(*many, *few)
    assert load.started == [(a, 0), (a, 10), (b, 20), (a, 30), (a, 40)]
    assert load.metric("baton_queued_requests") == 0


@pytest.mark.parametrize("many", [["a"] * 5, [f"a\n{i}" for i in range(5)]], ids=["a key", "with users"])
@jumping
async def test_a_full_queue_refuses_at_once_but_not_a_caller_without_its_share(many: list[str]) -> None:
    load = Load(num_running=1, num_waiting=4, lasts_s=5)
    await load.measured()
    tasks = [asyncio.create_task(load.one(each)) for each in many]
    await turn()
    before_s = asyncio.get_running_loop().time()
    for _ in range(2):
        await load.refused(many[-1])
    assert asyncio.get_running_loop().time() == before_s
    assert load.metric("baton_refused_requests_total", reason="queue_full") == 2
    tasks += load.several("b", 2)  # two keys: a share of two each
    await turn()
    await load.refused("b")
    await asyncio.gather(*tasks)
    assert [caller[0] for caller, _ in load.started] == ["a", "a", "b", "a", "b", "a", "a"]


@jumping
async def test_a_caller_is_refused_for_its_own_wait_and_not_for_anothers() -> None:
    load = Load(num_running=1, num_waiting=9)
    await load.measured()
    tasks = load.several("a", 6)  # the queue takes 50 s
    await turn()
    await load.refused("a", 59)
    await load.refused("b", 29)
    assert load.metric("baton_refused_requests_total", reason="too_late") == 2
    await load.one("b", deadline_s=31)  # in the second turn
    await asyncio.gather(*tasks, return_exceptions=True)


@jumping
async def test_no_one_waits_longer_than_a_proxy_does() -> None:
    load = Load(num_running=1, num_waiting=99, lasts_s=200)
    tasks = load.several("a", 2)  # how long requests last is not known yet
    await turn()
    with pytest.raises(Overloaded):
        await tasks[1]
    assert asyncio.get_running_loop().time() == pytest.approx(50)
    assert load.metric("baton_refused_requests_total", reason="waited") == 1
    await tasks[0]


@jumping
async def test_with_no_longest_wait_only_a_deadline_ends_it() -> None:
    load = Load(num_running=1, num_waiting=99, lasts_s=200, max_wait_s=0)
    tasks = load.several("a", 3)
    await turn()
    await load.refused("a", 90)  # how long requests last is not known yet
    assert asyncio.get_running_loop().time() == pytest.approx(90, abs=0.1)
    await asyncio.gather(*tasks)
    assert [at_s for _, at_s in load.started] == pytest.approx([0, 200, 400])


@jumping
async def test_refused_requests_come_back_one_after_the_other_as_places_become_free() -> None:
    load = Load(num_running=2, num_waiting=4, lasts_s=10)  # a place every 5 s
    await load.measured()
    tasks = load.several("a", 6)
    await turn()
    waits_s = [await load.refused() for _ in range(12)]
    await asyncio.gather(*tasks)
    # From when the queue is half empty on; 50 s at most.
    assert waits_s[:3] == pytest.approx([10 + 5, 10 + 10, 10 + 15])
    assert waits_s[-3:] == [50, 50, 50]


@jumping
async def test_prefill_gets_no_more_than_it_holds() -> None:
    load = Load(num_running=9, num_starting=2)
    await asyncio.gather(*(load.one("a", first_token_s=3) for _ in range(4)))
    assert [at_s for _, at_s in load.started] == [0, 0, 3, 3]


@pytest.mark.parametrize("is_let_in", [False, True])
@jumping
async def test_a_client_that_leaves_the_queue_frees_its_place(is_let_in: bool) -> None:
    load = Load(num_running=1, num_waiting=9, num_starting=1)
    first, second, third = load.several("a", 3)
    await turn()
    if is_let_in:  # the first one's end, and the second one's before it has noticed
        first.cancel()
        await asyncio.sleep(0)  # it ends
        await asyncio.sleep(0)  # its place is free
    second.cancel()
    await asyncio.gather(first, third, return_exceptions=True)
    assert len(load.started) == 2
    await asyncio.wait_for(load.one("b"), 11)
    assert load.metric("baton_queued_requests") == 0


@jumping
async def test_the_queue_is_bounded_for_any_number_of_callers() -> None:
    load = Load(num_running=1, num_waiting=20)
    await load.measured()
    async with running(*(load.one(str(caller)) for caller in range(500) for _ in range(3))):
        await turn()
        assert load.metric("baton_queued_requests") <= 2 * 20
    assert load.metric("baton_queued_requests") == 0


@jumping
async def test_of_one_callers_requests_the_lower_priority_goes_first() -> None:
    load, ended = Load(num_running=1), list[int]()

    async def one(priority: int) -> None:
        await load.one("a", priority=priority)
        ended.append(priority)

    await asyncio.gather(*map(one, (0, 2, -1, 1)))
    assert ended == [0, -1, 1, 2]


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (Capacity(2, 9, 3, 6), ("decode", "2 running, 7 waiting")),
        (Capacity(8, 3, 8, 6), ("prefill", "3 running, 6 waiting")),
    ],
)
@jumping
async def test_a_refusal_names_the_pool_and_its_load(capacity: Capacity, expected: tuple[str, str]) -> None:
    full: list[tuple[str, str]] = []
    admission = Admission(lambda _: capacity, Metrics(), on_full=lambda *seen: full.append(seen))
    async with running(*(admission.enter(request(600), "a") for _ in range(9))):
        await asyncio.sleep(0.5)  # virtual time
        assert not full
        with pytest.raises(Overloaded) as refused:
            await admission.enter(request(600), "a")
        pool, load = expected
        wait_s = math.ceil(refused.value.retry_after_s or 0)
        assert refused.value.message == f"All {pool} workers are busy ({load}). Retry in {wait_s} s."
        assert full == [expected]
        await asyncio.sleep(1)  # virtual time
        assert (set(full), len(full)) == ({expected}, 7), "the others wait for a second"
