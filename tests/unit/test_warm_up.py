"""The warm-up of a new worker's pairs: which peers it calls, what it sends, and what a failing peer costs."""

import logging
from collections.abc import AsyncGenerator
from functools import partial

import pytest

from baton.errors import HandoffFailed
from baton.messages import KvLayout, Role, WorkerInfo
from tests import scripted_workers as scripted
from tests.clock import jumping, now_s, run_jumping
from tests.generators import none_abandoned
from tests.scripted_workers import HANDOFF, Script, ScriptedWorkers, answer, failing, hand_off, hang
from workers.registration import warm_up_pairs

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def worker(name: str, role: Role, **changes: object) -> WorkerInfo:
    layout = KvLayout(dtype="f", tokens_per_block=16, num_layers=1, num_kv_heads=1, head_dim=1)
    facts = {"role": role, "incarnation": name, "kv_layout": layout, "kv_transfer": "tcp"}
    return scripted.worker(name, **facts | changes)


class House(ScriptedWorkers):
    """A discovery that shows `fleet`, and a transport to these peers by name."""

    def __init__(self, fleet: list[WorkerInfo], **scripts: Script) -> None:
        super().__init__(**scripts)
        self._fleet = tuple(fleet)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        yield self._fleet


def warmed(house: House, card: WorkerInfo) -> tuple[str, ...]:
    async def main() -> tuple[str, ...]:
        with none_abandoned():
            return await warm_up_pairs(card, partial(house.call, "me"), house, house)

    return run_jumping(main())


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_either_side_runs_a_request_through_each_pair_and_nothing_stays_open(role: Role) -> None:
    other, works = DECODE if role is PREFILL else PREFILL, {PREFILL: hand_off, DECODE: answer}
    fleet = [worker("me", role), worker("a", other), worker("b", other, is_ready=False)]
    house = House(fleet, me=works[role], a=works[other], b=works[other])
    assert warmed(house, fleet[0]) == ()
    assert (sorted(house.called), house.open) == (["a", "b", "me", "me"], [])
    asked = [request for _, request in house.calls]
    assert {len(request.token_ids) for request in asked} == {33}  # more than two blocks
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos) for r in asked} == {(2, True)}
    assert len({tuple(request.token_ids) for request in asked}) == 2  # of each pair, not in any cache
    decoded = [r for name, r in house.calls if (role if name == "me" else other) is DECODE]
    assert [request.handoff for request in decoded] == [HANDOFF] * 2


@jumping
async def test_peers_that_hang_cost_twenty_seconds_together() -> None:
    fleet = [worker("me", DECODE), *(worker(name, PREFILL) for name in "abc")]
    house = House(fleet, me=answer, a=hang, b=hang, c=hang)
    began_s = now_s()
    assert await warm_up_pairs(fleet[0], partial(house.call, "me"), house, house) == ("a", "b", "c")
    assert now_s() - began_s == pytest.approx(20)


def test_only_workers_that_can_be_paired_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    fleet = [
        worker("me", PREFILL),
        worker("p", PREFILL),
        worker("other", DECODE, model="n"),
        worker("unlike", DECODE, engine_version="2"),
        worker("agg", DECODE, kv_transfer=""),
    ]
    assert warmed(House(fleet), fleet[0]) == ()
    assert "refused pair me -> unlike: engine version 1 is not 2" in caplog.text
    assert "refused pair me -> agg: kv transfer tcp is not none" in caplog.text


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (hang, "TimeoutError"),
        (failing(HandoffFailed("no route to the KV")), "no route to the KV"),
        (answer, "prefill returned TokenChunk"),
    ],
)
def test_a_peer_that_fails_is_named_and_the_others_are_warm(
    fails: Script, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet = [worker("me", DECODE), worker("bad", PREFILL), worker("good", PREFILL)]
    house = House(fleet, me=answer, bad=fails, good=hand_off)
    assert warmed(house, fleet[0]) == ("bad",)
    assert "cold pair worker=me peer=bad" in caplog.text
    assert says in caplog.text
    assert "warm pair worker=me peer=good" in caplog.text
    assert house.open == []
