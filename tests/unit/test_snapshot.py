"""The snapshot of /fleet: what is counted each second, who is shown, who may see ids, who may watch."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from baton.errors import BrokerLost, NotReady
from frontend import snapshot
from frontend.metrics import Metrics, Others
from frontend.routing.fleet import Fleet
from frontend.snapshot import Look, Part, Second, Snapshots
from tests.clock import jumping
from tests.scripted_frontend import alone
from tests.unit.test_fleet import Registry, worker
from tests.waiting import until


@asynccontextmanager
async def shown(
    registry: Registry, others: Others = alone
) -> AsyncGenerator[tuple[Fleet, Metrics, Snapshots], None]:
    fleet, metrics = Fleet(registry, registry), Metrics()
    snapshots = Snapshots(fleet, metrics, others)
    snapshots.start()
    async with fleet.keep_current():
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


async def test_a_second_has_what_was_counted_in_it_and_old_ones_end() -> None:
    metrics = Metrics()
    series = Snapshots(Fleet(Registry(), Registry()), metrics, alone)
    for num_ended in (1, 2):
        for _ in range(num_ended):
            ended(metrics)
        series.tick()
    one, two = series.part(0).seconds
    assert (one.first_ms, one.gap_ms, one.counts) == ({40: 1}, {10: 99, 500: 1}, {"ended": 1})
    assert (two.first_ms, two.gap_ms, two.counts) == ({40: 2}, {10: 198, 500: 2}, {"ended": 2})
    assert (series.lately(1), series.lately(9)) == ({"ended": 2}, {"ended": 3})
    assert series.part(two.at_s + 1).seconds == []
    for _ in range(snapshot.SPAN_S):
        metrics.first_ms += Counter(range(0, 10_000, 9))
        series.tick()
    assert {len(each.counts) + len(each.gap_ms) for each in series.part(0).seconds} == {0}
    assert max(len(each.first_ms) for each in series.part(0).seconds) < 400  # small, however many requests


@jumping
async def test_the_parts_of_processes_are_added_but_workers_are_shown_once() -> None:
    now_s, looks = int(time.time()), list[int]()
    first_s = now_s - 30

    async def others(look: Look) -> list[Part]:
        """One has not yet counted this second, the other has; both had two first tokens in each."""
        looks.append(look.since_s)
        seconds = range(first_s, now_s + 1)
        counted = [Second(at_s, {40: 99, 900: 1}, {}, {"tokens": 10}) for at_s in seconds]
        part = Part(num_running=3, stages={"stream": 3}, handoffs={("p1", "d1"): 2})
        return [replace(part, seconds=seconds) for seconds in (counted, counted[:-1])]

    async with shown(Registry(worker("p1"), worker("d1")), others=others) as (fleet, metrics, snapshots):
        metrics.begin("/v1/x", "queued").leg()
        leg = metrics.begin("/v1/x", "r1").leg()
        leg.on(worker("p1"))
        fleet.handoffs["p1", "d1"] += 1
        await until(lambda: snapshots.part(0).handoffs)
        body = await read(snapshots)
        await asyncio.sleep(2)  # virtual time
        later = await read(snapshots)
    assert body["num_running"] == 7
    assert body["stages"] == {"prefill": 1, "stream": 6, "queue": 1}
    assert states(body) == {"p1": "ready", "d1": "ready"}
    assert body["pairs"] == [{"prefill": "p1", "decode": "d1", "state": "ready", "num_handoffs": 5}]
    assert body["tokens_per_s"] == pytest.approx(20, abs=4)  # the wall clock may go on meanwhile
    assert body["points"][0] == [first_s, 0.04, 0.04, None, None]
    assert (looks[0], looks[1] > first_s) == (0, True)  # later only what is new
    assert [len(each["points"]) for each in (body, later)] == [31, 31]


@jumping
async def test_one_snapshot_a_second_is_made_for_all_and_none_without_viewers() -> None:
    registry = Registry(worker("d1"))
    async with shown(registry) as (_, _, snapshots):
        num_calls = registry.num_calls
        await asyncio.sleep(5)  # virtual time
        assert registry.num_calls == num_calls
        registry.hung.add("d1")  # so that it takes as long as it may
        first = await asyncio.gather(*(snapshots.latest(with_ids=True) for _ in range(50)))
        assert registry.num_calls == num_calls + 1
        assert len({id(each) for each in first}) == 1


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
        await asyncio.sleep(2)  # virtual time
        assert states(await read(snapshots)) == {"d1": "ready"} | ({} if answers else {"p1": "lost"})
        registry.show(worker("d1"), worker("p1", address="new", incarnation="new"))
        await until(lambda: len(fleet.table.live()) == 2)
        await asyncio.sleep(2)  # virtual time
        assert states(await read(snapshots)) == {"d1": "ready", "p1": "ready"}
        registry.dead.add("new")
        registry.show(worker("d1"))
        await asyncio.sleep(2)  # virtual time
        assert [each["state"] for each in (await read(snapshots))["workers"]] == ["ready", "lost"]


@jumping
async def test_a_worker_without_statistics_is_silent_or_lost_and_has_no_figures() -> None:
    registry = Registry(worker("d1"), worker("d2"), worker("p1"))
    async with shown(registry) as (fleet, _, snapshots):
        await until(lambda: len(fleet.table.live()) == 3)
        assert (await read(snapshots))["workers"][0]["num_running"] == 3
        registry.hung.add("d1")
        registry.dead.add("d2")
        fleet.table.note(worker("p1"), "stalled", "no progress")
        await asyncio.sleep(1)  # virtual time
        body = await read(snapshots)
        assert fleet.health().lost == ["d2"]  # requests go to others
        assert states(body) == {"d1": "silent", "d2": "lost", "p1": "stuck"}
        assert [each["num_running"] for each in body["workers"]][:2] == [None, None]
        assert all(each["reason"] for each in body["workers"])
        assert [found.worker_id for found, _ in await fleet.ask_all()] == ["d1", "p1"]
        registry.dead, registry.error = {"p1"}, BrokerLost("worker p1 was lost: NATS is away")
        fleet.table.note(worker("p1"), "answered")
        await asyncio.sleep(1)  # virtual time
        assert (await read(snapshots))["workers"][2]["reason"] == "NATS is away"
        assert {pair["state"] for pair in body["pairs"]} == {"away"}


@jumping
async def test_viewers_are_bounded_and_end_when_the_frontend_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_VIEWERS", 2)
    async with shown(Registry(worker("d1"))) as (_, _, snapshots):
        views = [snapshots.stream(with_ids=True) for _ in range(2)]
        with pytest.raises(NotReady):  # before they begin
            snapshots.stream(with_ids=True)
        for view in views:
            assert (await anext(view)).startswith(b"data: {")
        del view
        await views.pop().aclose()  # a viewer that leaves makes room
        views.append(snapshots.stream(with_ids=True))
        await anext(views[1])
        snapshots.close()
        assert [[event async for event in view] for view in views] == [[], []]
