"""The fleet's view of a quiet worker: slow, stuck or silent; and how a stuck one comes back."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import WorkerLost
from baton.messages import GenerateRequest, Reply, Request, Role, StatsRequest, WorkerInfo, WorkerStats
from frontend.routing.fleet import Fleet
from tests.clock import jumping
from tests.scripted_workers import PlaneDouble, answer, hand_off, waiting, worker
from tests.waiting import until


class Engines(PlaneDouble):
    """A transport and a discovery of these workers. A `hung` engine answers no request; `figure` counts what
    d1 has computed, by the name of `figure_name`; a `silent` worker does not answer at all.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.figure_name = "num_generated_tokens"
        self.hung: set[str] = set()
        self.silent: set[str] = set()
        self.figure: Callable[[], int] = lambda: 7
        self.asked: list[str] = []
        self.lost: list[tuple[str, str]] = []

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        if not isinstance(request, StatsRequest):
            self.asked.append(address)
        if address in self.silent:
            raise WorkerLost("silent")
        if isinstance(request, StatsRequest):
            yield WorkerStats(**{self.figure_name: self.figure()})
            return
        assert isinstance(request, GenerateRequest)
        if address in self.hung:
            await asyncio.sleep(request.deadline_s)
            raise WorkerLost("over")
        async for reply in hand_off(request) if address == "p1" else answer(request):
            yield reply

    def lose(self, address: str, reason: str) -> None:
        self.lost.append((address, reason))

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        yield tuple(worker(name) for name in self.names)
        await asyncio.Event().wait()


@asynccontextmanager
async def fleet_of(*names: str) -> AsyncIterator[tuple[Engines, Fleet]]:
    engines = Engines(*names)
    fleet = Fleet(engines, engines, model_path=Path("/none"))
    async with fleet.keep_current():
        await until(lambda: fleet.health().instances)
        yield engines, fleet


def live(fleet: Fleet) -> list[str]:
    return [w.worker_id for role in Role for w in fleet.workers("m", role)]


@pytest.mark.parametrize("name", ["d1", "p1"])
@jumping
async def test_a_worker_whose_engine_hangs_is_left_out_until_a_request_passes_through_a_pair(
    name: str,
) -> None:
    async with fleet_of("d1", "p1") as (engines, fleet):
        engines.hung.add(name)
        with waiting(fleet.calls, worker(name), []):
            await asyncio.sleep(19)
            assert not engines.lost
            await asyncio.sleep(2)
        assert engines.lost == [(name, "its engine makes no progress")]
        assert (fleet.health().stuck, fleet.health().lost) == ([name], [])
        assert name not in live(fleet)
        await asyncio.sleep(60)
        assert fleet.health().stuck == [name]

        engines.hung.clear()
        engines.asked.clear()
        await until(lambda: not fleet.health().stuck)
        assert engines.asked[-2:] == ["p1", "d1"]
        assert len(live(fleet)) == 2


@jumping
async def test_a_worker_that_answers_a_request_of_our_own_is_only_slow() -> None:
    async with fleet_of("d1", "p1") as (engines, fleet):
        with waiting(fleet.calls, worker("d1"), []):
            await asyncio.sleep(45)
        assert len(engines.asked) == 4
        assert (engines.lost, live(fleet)) == ([], ["p1", "d1"])


@pytest.mark.parametrize("figure_name", ["num_prompt_tokens", "num_generated_tokens", "num_handoffs"])
@jumping
async def test_a_worker_that_computes_for_others_is_only_busy(figure_name: str) -> None:
    async with fleet_of("d1", "p1") as (engines, fleet):
        engines.figure_name = figure_name
        engines.hung.add("d1")  # our own request waits in its queue
        engines.figure = lambda: round(asyncio.get_running_loop().time())
        with waiting(fleet.calls, worker("d1"), []):
            await asyncio.sleep(60)
        assert engines.asked
        assert (engines.lost, live(fleet)) == ([], ["p1", "d1"])


@jumping
async def test_a_worker_that_does_not_answer_at_all_is_left_to_the_liveness_limit() -> None:
    async with fleet_of("d1", "p1") as (engines, fleet):
        engines.silent.add("d1")
        with waiting(fleet.calls, worker("d1"), []):
            await asyncio.sleep(60)
        assert (engines.lost, fleet.health().stuck, engines.asked) == ([], [], [])


@jumping
async def test_a_stuck_worker_is_tried_with_one_that_it_can_be_paired_with() -> None:
    async with fleet_of("d1", "p1", "p2x", "p3x", "p4x") as (engines, fleet):
        engines.hung.add("d1")
        with waiting(fleet.calls, worker("d1"), []):
            await until(lambda: engines.lost)
        engines.asked.clear()
        await asyncio.sleep(120)
        assert engines.asked
        assert not {"p2x", "p3x", "p4x"} & set(engines.asked)
