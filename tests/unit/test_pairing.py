"""Which prefill workers feed which decode workers, and trials of a worker or a pair."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import GenerateRequest, KvHandoff, KvLayout, Request, Role, TokenChunk, WorkerInfo
from baton.pairing import refused_pairs, why_not_paired, works
from baton.tcp import TcpTransport
from tests import scripted_workers as scripted
from tests.generators import none_abandoned
from tests.planes import HANDOFF, Stream
from tests.waiting import PATIENCE_S, until

LAYOUT = KvLayout(dtype="bfloat16", tokens_per_block=32, num_layers=36, num_kv_heads=8, head_dim=64)


def worker(role: Role, **changes: object) -> WorkerInfo:
    facts = {"engine": "trtllm", "engine_version": "1.2.0", "kv_layout": LAYOUT, "checkpoint": "a1"}
    return scripted.worker(role.value[0], **facts | {"kv_transfer": "ucx-cpp (tp 4, buffer 65536)"} | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "vllm"}, "engine trtllm is not vllm"),
        ({"engine_version": "1.2.1"}, "engine version 1.2.0 is not 1.2.1"),
        ({"kv_transfer": "nixl (tp 4)"}, "kv transfer ucx-cpp is not nixl"),
        ({"kv_transfer": ""}, "kv transfer ucx-cpp is not none"),
        ({"checkpoint": "b2"}, "checkpoint a1 is not b2"),
        ({"dtype": "fp8"}, "dtype bfloat16 is not fp8"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size 1 is not 4"),
        ({"draft": "eagle3 a1 3"}, "draft none is not eagle3 a1 3"),
        ({"dtype": "fp8", "head_dim": 128}, "dtype bfloat16 is not fp8, head_dim 64 is not 128"),
    ],
)
def test_unlike_workers_are_not_paired_and_both_values_are_named(
    changes: dict[str, object], says: str
) -> None:
    layout = {name: changes.pop(name) for name in KvLayout.__struct_fields__ if name in changes}
    prefill = worker(Role.PREFILL)
    decode = worker(Role.DECODE, kv_layout=msgspec.structs.replace(LAYOUT, **layout), **changes)

    assert why_not_paired(prefill, decode) == f"p -> d: {says}"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"checkpoint": "a1"}, {"checkpoint": ""}),
        ({"checkpoint": ""}, {"checkpoint": "a1"}),
        ({"checkpoint": ""}, {"checkpoint": ""}),
        ({}, {"kv_transfer": "ucx-cpp (tp 8)"}),
    ],
)
def test_an_unknown_checkpoint_and_another_transport_fit(
    prefill: dict[str, str], decode: dict[str, str]
) -> None:
    assert why_not_paired(worker(Role.PREFILL, **prefill), worker(Role.DECODE, **decode)) is None


def test_an_unknown_layout_fits_no_other() -> None:
    reason = why_not_paired(worker(Role.PREFILL), worker(Role.DECODE, kv_layout=None))

    assert reason is not None
    assert reason.startswith("p -> d: kv layout KvLayout(")
    assert reason.endswith("is not None")


def test_refused_are_pairs_of_one_model_only() -> None:
    workers = (
        worker(Role.PREFILL, worker_id="p1"),
        worker(Role.PREFILL, worker_id="p2", engine="vllm"),
        worker(Role.DECODE, worker_id="d1", engine="vllm"),
        worker(Role.DECODE, worker_id="d2"),
        worker(Role.DECODE, worker_id="d3", engine="vllm", model="other"),
    )

    assert refused_pairs(workers) == [
        "p1 -> d1: engine trtllm is not vllm",
        "p2 -> d2: engine vllm is not trtllm",
    ]


class Answers:
    """A worker that gives these replies, raising errors among them, and then waits if it `stays`."""

    def __init__(self, *replies: TokenChunk | KvHandoff | Exception, stays: bool = False) -> None:
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.saw_open: list[int] = []
        self.other: Answers | None = None
        self._replies = replies
        self._stays = stays

    async def answer(self, request: Request) -> Stream:
        assert isinstance(request, GenerateRequest)
        self.requests.append(request)
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
            assert await works(transport, worker(Role.DECODE, address=addresses[0]), limit_s=9.0) == succeeds
        await until(lambda: not answers.num_open)
    assert [each.deadline_s for each in answers.requests] == [9.0]


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
        pair = [worker(Role.PREFILL, address=addresses[0]), worker(Role.DECODE, address=addresses[1])]
        mine, partner = pair if role is Role.PREFILL else reversed(pair)
        assert await works(transport, mine, partner, limit_s=9.0) == succeeds
        await until(lambda: not prefill.num_open)
    assert [each.handoff for each in prefill.requests] == [None]
    if prefilled == [HANDOFF]:
        assert [each.handoff for each in decode.requests] == [HANDOFF]
        assert decode.saw_open == [1, 1]
    else:
        assert not decode.requests
