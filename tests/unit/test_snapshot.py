"""The snapshot of /fleet: what is counted each second, who is shown, who may see ids, who may watch."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import NotReady
from frontend import snapshot
from frontend.metrics import Metrics
from frontend.routing.fleet import Fleet
from frontend.routing.workers import Event
from frontend.snapshot import Part, Second, Series, Snapshots, quantile
from tests.clock import jumping
from tests.unit.test_fleet import Registry, worker
from tests.waiting import until


@asynccontextmanager
async def shown(registry: Registry, **options: Any) -> AsyncGenerator[tuple[Fleet, Metrics, Snapshots], None]:
    fleet, metrics = Fleet(registry, registry), Metrics()
    snapshots = Snapshots(fleet, metrics, **options)
    async with fleet.keep_current(), snapshots.running():
        await until(fleet.table.live)
        yield fleet, metrics, snapshots


async def read(snapshots: Snapshots, *, with_ids: bool = True) -> Any:
    return json.loads(await snapshots.latest(with_ids=with_ids))


def states(body: Any) -> dict[str, str]:
    return {each["name"]: each["state"] for each in body["workers"]}


def ended(metrics: Metrics, request_id: str = "r1") -> None:
    record = metrics.begin("/v1/x", request_id, "someone")
    record.model, record.status = "m", 200
    metrics.first_ms[40] += 1
    metrics.gaps(record)[10] += 99
    metrics.gaps(record)[500] += 1
    metrics.end(record)


@pytest.mark.parametrize(
    ("counts", "share", "found"),
    [
        ({}, 0.5, None),
        ({10: 1}, 0.5, 0.0105),
        ({10: 99, 500: 1}, 0.5, 0.0105),
        ({10: 98, 500: 2}, 0.99, 0.5005),
        ({1: 1, 2: 1}, 1.0, 0.003),
    ],
)
def test_quantiles_lie_in_the_millisecond_that_was_counted(
    counts: dict[int, int], share: float, found: float | None
) -> None:
    assert quantile(counts, share) == pytest.approx(found, abs=1e-3)


async def test_a_second_has_what_was_counted_in_it_and_old_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    series = Series(Fleet(Registry(), Registry()), metrics)
    ended(metrics)
    series.tick()
    ended(metrics)
    ended(metrics)
    series.tick()
    one, two = series.part().seconds
    assert (one.first_ms, one.gap_ms, one.counts) == ({40: 1}, {10: 99, 500: 1}, {"ended": 1})
    assert (two.first_ms, two.gap_ms, two.counts) == ({40: 2}, {10: 198, 500: 2}, {"ended": 2})
    for _ in range(snapshot.SPAN_S):
        series.tick()
    assert {len(second.counts) + len(second.gap_ms) for second in series.part().seconds} == {0}


@jumping
async def test_the_parts_of_processes_are_added_but_workers_are_shown_once() -> None:
    async def others() -> list[Part]:
        second = Second(10**9, Counter({40: 1}), Counter(), Counter(ended=5, refused=1))
        return [Part(num_running=3, stages={"stream": 3}, seconds=[second], handoffs=[("p1", "d1", 2)])] * 2

    async with shown(Registry(worker("p1"), worker("d1")), others=others) as (fleet, metrics, snapshots):
        metrics.begin("/v1/x", "r1").enter("render")
        fleet.handoffs["p1", "d1"] += 1
        await until(lambda: snapshots.part().handoffs)
        body = await read(snapshots)
    assert body["num_running"] == 7
    assert body["stages"] == {"render": 1, "stream": 6}
    assert states(body) == {"p1": "ready", "d1": "ready"}
    assert body["pairs"] == [{"prefill": "p1", "decode": "d1", "state": "ready", "num_handoffs": 5}]
    assert [point["at_s"] for point in body["points"]] == [10**9]


@jumping
async def test_one_snapshot_a_second_is_made_for_all_and_none_without_viewers() -> None:
    registry = Registry(worker("d1"))
    async with shown(registry) as (_, _, snapshots):
        num_calls = registry.num_calls
        await asyncio.sleep(5)
        assert registry.num_calls == num_calls
        first = await asyncio.gather(*(snapshots.latest(with_ids=True) for _ in range(50)))
        assert registry.num_calls == num_calls + 1
        assert len({id(each) for each in first}) == 1


@jumping
async def test_ids_are_for_those_who_may_see_them() -> None:
    async with shown(Registry(worker("d1"))) as (_, metrics, snapshots):
        ended(metrics, "secret-id")
        assert (await read(snapshots))["slowest"][0]["request_id"] == "secret-id"
        hidden = await snapshots.latest(with_ids=False)
        assert json.loads(hidden)["slowest"][0]["request_id"] is None
        assert b"secret-id" not in hidden
        assert b"someone" not in hidden


@jumping
@pytest.mark.parametrize("answers", [True, False])
async def test_a_worker_that_died_is_shown_until_another_takes_its_name(answers: bool) -> None:
    """One that withdraws answers for a while, and is not shown."""
    registry = Registry(worker("d1"), worker("p1"))
    async with shown(registry) as (fleet, _, snapshots):
        if not answers:
            registry.dead.add("p1")
        registry.show(worker("d1"))
        await until(lambda: len(fleet.table.all()) == 1)
        await asyncio.sleep(2)
        assert states(await read(snapshots)) == {"d1": "ready"} | ({} if answers else {"p1": "lost"})
        registry.show(worker("d1"), worker("p1", address="new", incarnation="new"))
        await until(lambda: len(fleet.table.live()) == 2)
        await asyncio.sleep(2)
        assert states(await read(snapshots)) == {"d1": "ready", "p1": "ready"}


@jumping
async def test_a_worker_without_statistics_is_silent_or_lost_and_has_no_figures() -> None:
    registry = Registry(worker("d1"), worker("d2"), worker("p1"))
    async with shown(registry) as (fleet, _, snapshots):
        await until(lambda: len(fleet.table.live()) == 3)
        assert (await read(snapshots))["workers"][0]["num_running"] == 3
        registry.hung.add("d1")
        registry.dead.add("d2")
        fleet.table.note(worker("p1"), Event.STALLED)
        await asyncio.sleep(1)
        body = await read(snapshots)
        assert states(body) == {"d1": "silent", "d2": "lost", "p1": "stuck"}
        assert [each["num_running"] for each in body["workers"]][:2] == [None, None]
        assert all(each["reason"] for each in body["workers"])
        assert {pair["state"] for pair in body["pairs"]} == {"away"}


@jumping
async def test_viewers_are_bounded_and_end_when_the_frontend_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_VIEWERS", 2)
    async with shown(Registry(worker("d1"))) as (_, _, snapshots):
        views = [snapshots.stream(with_ids=True) for _ in range(2)]
        for view in views:
            assert (await anext(view)).startswith(b"data: {")
        with pytest.raises(NotReady):
            snapshots.stream(with_ids=True)
        await views.pop().aclose()  # a viewer that leaves makes room
        views.append(snapshots.stream(with_ids=True))
        await anext(views[1])
        snapshots.close()
        assert [[event async for event in view] for view in views] == [[], []]
