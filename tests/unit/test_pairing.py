"""Which prefill workers feed which decode workers, and trials of a worker or a pair."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from baton.errors import BatonError, HandoffFailed
from baton.messages import GenerateRequest, KvLayout, Reply, Role, TokenChunk, WorkerInfo
from baton.pairing import refused_pairs, why_not_paired, works
from tests import scripted_workers as scripted
from tests.generators import none_abandoned
from tests.scripted_workers import HANDOFF, ScriptedWorkers, script

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


CHUNK = TokenChunk(token_ids=(1,))


async def test_a_worker_that_ends_without_a_reply_does_not_work() -> None:
    fleet = ScriptedWorkers(d=script())
    with none_abandoned():
        assert not await works(fleet, worker(Role.DECODE), limit_s=9.0)
    assert [(name, each.deadline_s) for name, each in fleet.calls] == [("d", 9.0)]


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
    role: Role, prefilled: list[Reply], decoded: list[Reply | BatonError], succeeds: bool
) -> None:
    saw_open = []

    async def decode(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        for step in decoded:
            await asyncio.sleep(0)  # not in the turn of the one before
            saw_open.append(list(fleet.open))
            async for reply in script(step)(sent):
                yield reply

    fleet = ScriptedWorkers(p=script(*prefilled, *[None] * len(prefilled)), d=decode)
    pair = [worker(Role.PREFILL), worker(Role.DECODE)]
    mine, partner = pair if role is Role.PREFILL else reversed(pair)
    assert await works(fleet, mine, partner, limit_s=9.0) == succeeds
    assert fleet.open == []
    is_handed_over = prefilled == [HANDOFF]
    assert [each.handoff for _, each in fleet.calls] == [None, *[HANDOFF] * is_handed_over]
    assert saw_open == [["p", "d"]] * 2 * is_handed_over
