"""Trials: what they ask of a worker or a pair, which answers count as success, what they leave open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.errors import HandoffFailed
from baton.messages import GenerateRequest, KvHandoff, KvLayout, Request, Role, TokenChunk, WorkerInfo
from baton.pairing import trial_request, works
from baton.tcp import TcpTransport
from tests import scripted_workers as scripted
from tests.generators import none_abandoned
from tests.planes import HANDOFF, Stream
from tests.waiting import PATIENCE_S, until

LAYOUT = KvLayout(dtype="f", tokens_per_block=16, num_layers=1, num_kv_heads=1, head_dim=1)


def worker(role: Role, address: str = "", **changes: object) -> WorkerInfo:
    facts = {"worker_id": role.value, "address": address, "kv_layout": LAYOUT}
    return scripted.worker(role.value, **facts | changes)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tokens"),
    [
        ({}, {}, 33),  # more than two blocks
        ({"context_length": 20}, {}, 18),  # and two that are computed
        ({}, {"context_length": 20}, 18),
        ({"kv_layout": None}, {}, 3),
    ],
)
def test_a_prompt_fills_two_blocks_and_leaves_room_for_two_tokens(
    prefill: dict[str, Any], decode: dict[str, Any], num_tokens: int
) -> None:
    pair = worker(Role.PREFILL, **prefill), worker(Role.DECODE, **decode)
    requests = [trial_request("warm", *pair, deadline_s=7.0) for _ in range(9)]

    assert {len(each.token_ids) for each in requests} == {num_tokens}
    assert len({tuple(each.token_ids) for each in requests}) > 1  # a cached one would not be moved
    assert {each.request_id for each in requests} == {"warm-prefill-decode"}
    one = requests[0]
    assert (one.model, one.deadline_s) == ("m", 7.0)
    assert (one.sampling.max_tokens, one.sampling.temperature, one.sampling.ignore_eos) == (2, 0.0, True)


class Answers:
    """A worker that gives these replies, raising errors among them, and then waits if it `stays`."""

    def __init__(self, *replies: TokenChunk | KvHandoff | Exception, stays: bool = False) -> None:
        self.asked: list[GenerateRequest] = []
        self.num_open = 0
        self.saw_open: list[int] = []
        self.other: Answers | None = None
        self._replies = replies
        self._stays = stays

    async def answer(self, request: Request) -> Stream:
        assert isinstance(request, GenerateRequest)
        self.asked.append(request)
        self.num_open += 1
        try:
            for reply in self._replies:
                await asyncio.sleep(0)  # not in the turn of the one before
                if self.other is not None:
                    self.saw_open.append(self.other.num_open)
                if isinstance(reply, Exception):
                    raise reply
                yield reply
            if self._stays:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1


CHUNK = TokenChunk(token_ids=(1,))


@asynccontextmanager
async def plane(*answers: Answers) -> AsyncIterator[tuple[TcpTransport, list[str]]]:
    transport = TcpTransport()
    async with (
        asyncio.timeout(PATIENCE_S),
        transport.serve("0", answers[0].answer) as first,
        transport.serve("1", answers[-1].answer) as second,
    ):
        yield transport, [first, second]
        await transport.close()


@pytest.mark.parametrize(
    ("answers", "succeeds"),
    [
        (Answers(CHUNK, stays=True), True),
        (Answers(), False),
        (Answers(HandoffFailed("no")), False),
    ],
)
async def test_a_worker_works_if_it_replies_and_is_not_asked_for_more(
    answers: Answers, succeeds: bool
) -> None:
    async with plane(answers) as (transport, addresses):
        with none_abandoned():
            assert await works(transport, worker(Role.DECODE, addresses[0]), limit_s=9.0) == succeeds
        await until(lambda: not answers.num_open)
    assert [each.deadline_s for each in answers.asked] == [9.0]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("prefilled", "decoded", "succeeds"),
    [
        ([HANDOFF], [CHUNK, CHUNK], True),
        ([HANDOFF], [CHUNK, HandoffFailed("no")], False),
        ([CHUNK], [CHUNK], False),
        ([], [CHUNK], False),
    ],
)
async def test_a_pair_works_if_decode_ends_while_prefill_holds_the_kv(
    role: Role, prefilled: list[TokenChunk | KvHandoff], decoded: list[TokenChunk | Exception], succeeds: bool
) -> None:
    prefill, decode = Answers(*prefilled, stays=bool(prefilled)), Answers(*decoded)
    decode.other = prefill
    async with plane(prefill, decode) as (transport, addresses):
        pair = [worker(Role.PREFILL, addresses[0]), worker(Role.DECODE, addresses[1])]
        mine, partner = pair if role is Role.PREFILL else reversed(pair)
        assert await works(transport, mine, partner, limit_s=9.0) == succeeds
        await until(lambda: not prefill.num_open)
    assert [each.handoff for each in prefill.asked] == [None]
    if prefilled == [HANDOFF]:
        assert [each.handoff for each in decode.asked] == [HANDOFF]
        assert decode.saw_open == [1, 1]
    else:
        assert not decode.asked
