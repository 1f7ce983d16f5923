"""The warm-up of a new worker's pairs: which peers it calls, what it sends, and what a failing peer costs."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from baton.errors import HandoffFailed
from baton.messages import GenerateRequest, KvHandoff, KvLayout, Reply, Request, Role, TokenChunk, WorkerInfo
from tests import scripted_workers as scripted
from tests.clock import jumping, run_jumping
from tests.generators import none_abandoned
from workers.registration import warm_up_pairs

HANDOFF = KvHandoff(
    worker_id="p", incarnation="p", first_token=1, num_prompt_tokens=1, ttl_s=9, engine_state=b""
)
PREFILL, DECODE = Role.PREFILL, Role.DECODE


def worker(name: str, role: Role, **changes: object) -> WorkerInfo:
    layout = KvLayout(dtype="f", tokens_per_block=16, num_layers=1, num_kv_heads=1, head_dim=1)
    facts = {"role": role, "incarnation": name, "kv_layout": layout, "kv_transfer": "tcp"}
    return scripted.worker(name, **facts | changes)


class Peer:
    """A worker that answers in its role and records requests and closed calls; `fails` selects a failure."""

    def __init__(self, role: Role, fails: str = "") -> None:
        self.asked: list[GenerateRequest] = []
        self.num_open = 0
        self._role = role
        self._fails = fails

    async def answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        assert isinstance(request, GenerateRequest)
        self.asked.append(request)
        self.num_open += 1
        try:
            if self._fails == "hangs":
                await asyncio.Event().wait()
            if self._fails == "raises":
                raise HandoffFailed("no route to the KV")
            if self._role is DECODE or self._fails == "finishes":
                assert self._fails == "finishes" or request.handoff is not None
                yield TokenChunk((1, 2), "length")
                return
            yield HANDOFF
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


class House(scripted.PlaneDouble):
    """A discovery that shows `fleet`, and a transport to its peers by name."""

    def __init__(self, fleet: list[WorkerInfo], peers: dict[str, Peer]) -> None:
        self._fleet = tuple(fleet)
        self._peers = peers

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        yield self._fleet

    def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        return self._peers[address].answer(request)


def warmed(card: WorkerInfo, own: Peer, house: House) -> tuple[str, ...]:
    async def main() -> tuple[str, ...]:
        with none_abandoned():
            return await warm_up_pairs(card, own.answer, house, house)

    return run_jumping(main())


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_either_side_runs_a_request_through_each_pair_and_nothing_stays_open(role: Role) -> None:
    other = DECODE if role is PREFILL else PREFILL
    own, peers = Peer(role), {"a": Peer(other), "b": Peer(other)}
    fleet = [worker("me", role), worker("a", other), worker("b", other, is_ready=False)]

    assert warmed(fleet[0], own, House(fleet, peers)) == ()

    assert [len(peer.asked) for peer in peers.values()] == [1, 1]
    assert [own.num_open, *(peer.num_open for peer in peers.values())] == [0, 0, 0]
    asked = [request for peer in (own, *peers.values()) for request in peer.asked]
    assert {len(request.token_ids) for request in asked} == {33}  # more than two blocks
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos) for r in asked} == {(2, True)}
    assert len({tuple(request.token_ids) for request in own.asked}) == 2  # not in any cache


@jumping
async def test_peers_that_hang_cost_twenty_seconds_together() -> None:
    names = ["a", "b", "c"]
    fleet = [worker("me", DECODE), *(worker(name, PREFILL) for name in names)]
    house = House(fleet, {name: Peer(PREFILL, "hangs") for name in names})
    began_s = asyncio.get_running_loop().time()
    assert await warm_up_pairs(fleet[0], Peer(DECODE).answer, house, house) == ("a", "b", "c")
    assert (asyncio.get_running_loop().time() - began_s) == pytest.approx(20)


def test_only_workers_that_can_be_paired_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    fleet = [
        worker("me", PREFILL),
        worker("p", PREFILL),
        worker("other", DECODE, model="n"),
        worker("unlike", DECODE, engine_version="2"),
        worker("agg", DECODE, kv_transfer=""),
    ]

    assert warmed(fleet[0], Peer(PREFILL), House(fleet, {})) == ()
    assert "refused pair me -> unlike: engine version 1 is not 2" in caplog.text
    assert "refused pair me -> agg: kv transfer tcp is not none" in caplog.text


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("hangs", "TimeoutError"),
        ("raises", "no route to the KV"),
        ("finishes", "prefill returned TokenChunk"),
    ],
)
def test_a_peer_that_fails_is_named_and_the_others_are_warm(
    fails: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, peers = Peer(DECODE), {"bad": Peer(PREFILL, fails), "good": Peer(PREFILL)}
    fleet = [worker("me", DECODE), worker("bad", PREFILL), worker("good", PREFILL)]

    assert warmed(fleet[0], own, House(fleet, peers)) == ("bad",)
    assert "cold pair worker=me peer=bad" in caplog.text
    assert says in caplog.text
    assert "warm pair worker=me peer=good" in caplog.text
    assert [own.num_open, peers["bad"].num_open, peers["good"].num_open] == [0, 0, 0]
