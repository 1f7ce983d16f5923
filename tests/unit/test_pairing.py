"""Which prefill workers feed which decode workers: what must be equal, and the error otherwise."""

import msgspec
import pytest

from baton.messages import KvLayout, Role, WorkerInfo
from baton.pairing import refused_pairs, why_not_paired
from tests import scripted_workers as scripted

LAYOUT = KvLayout(
    dtype="bfloat16",
    tokens_per_block=32,
    num_layers=36,
    num_kv_heads=8,
    head_dim=64,
    tensor_parallel_size=1,
    max_handoff_tokens=65536,
)


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
        ({"tokens_per_block": 64}, "tokens_per_block 32 is not 64"),
        ({"num_layers": 24}, "num_layers 36 is not 24"),
        ({"num_kv_heads": 4}, "num_kv_heads 8 is not 4"),
        ({"head_dim": 128}, "head_dim 64 is not 128"),
        ({"tensor_parallel_size": 4}, "tensor_parallel_size 1 is not 4"),
        ({"max_handoff_tokens": 1024}, "max_handoff_tokens 65536 is not 1024"),
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


@pytest.mark.parametrize("unknown", [{"decode": ""}, {"prefill": ""}, {"prefill": "", "decode": ""}])
def test_an_unknown_checkpoint_fits_any(unknown: dict[str, str]) -> None:
    prefill, decode = (
        worker(role, checkpoint=unknown.get(role.value, "a1")) for role in (Role.PREFILL, Role.DECODE)
    )
    assert why_not_paired(prefill, decode) is None


def test_an_unknown_layout_fits_no_other() -> None:
    reason = why_not_paired(worker(Role.PREFILL), worker(Role.DECODE, kv_layout=None))

    assert reason is not None
    assert reason.startswith("p -> d: kv layout KvLayout(")
    assert reason.endswith("is not None")


def test_like_workers_are_paired_whatever_they_say_about_their_transport() -> None:
    assert why_not_paired(worker(Role.PREFILL), worker(Role.DECODE, kv_transfer="ucx-cpp (tp 8)")) is None


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
