"""Pairs between which no KV moves: how often they are tried, and when requests use them again."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.errors import HandoffStalled
from baton.messages import GenerateRequest, Reply, WorkerInfo
from frontend.routing.workers import CutPairs
from tests.clock import jumping
from tests.scripted_workers import Script, ScriptedWorkers, answer, failing, hand_off, worker

P1, P2, D1 = worker("p1"), worker("p2"), worker("d1")


def cut_pairs(d1: Script, registered: list[WorkerInfo]) -> tuple[ScriptedWorkers, CutPairs]:
    fleet = ScriptedWorkers(p1=hand_off, d1=d1)
    return fleet, CutPairs(fleet, registered.__contains__)


@jumping
async def test_a_cut_pair_is_tried_after_ten_seconds_then_less_and_less_often() -> None:
    loop_s: list[float] = []

    async def stalling(asked: GenerateRequest) -> AsyncGenerator[Reply, None]:
        loop_s.append(asyncio.get_running_loop().time())
        works = answer if len(loop_s) == 6 else failing(HandoffStalled("nothing came"))
        async for reply in works(asked):
            yield reply

    fleet, pairs = cut_pairs(stalling, [P1, D1])
    pairs.add(P1, D1)
    pairs.add(P1, D1)
    assert (pairs.has(P1, D1), pairs.has(P2, D1), pairs.names()) == (True, False, ["p1 -> d1"])
    assert not pairs.has(msgspec.structs.replace(P1, incarnation="p1.2"), D1), "it was started again"
    (trial,) = pairs.trials
    await trial
    assert loop_s == pytest.approx([10, 30, 70, 130, 190, 250])
    assert fleet.asked == ["p1", "d1"] * 6
    assert {asked.deadline_s for _, asked in fleet.calls} == {5}
    assert (pairs.has(P1, D1), pairs.names(), fleet.open) == (False, [], [])


@pytest.mark.parametrize("left", [P1, D1])
@jumping
async def test_a_pair_of_which_one_worker_has_left_is_forgotten(left: WorkerInfo) -> None:
    fleet, pairs = cut_pairs(answer, [left])
    pairs.add(P1, D1)
    await asyncio.gather(*pairs.trials)
    assert not pairs.names()
    assert not fleet.calls
