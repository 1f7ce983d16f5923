"""Which prefill workers can hand their KV to which decode workers."""

from collections.abc import Sequence

import msgspec

from baton.messages import KvLayout, Role, WorkerInfo


def why_not_paired(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why two workers cannot exchange KV, naming both values; None if they can.

    Versions must be equal too: another release may interpret a handoff differently. So must checkpoints that
    are known: KV of other weights has the same shape.
    """
    for name, left, right in (
        ("engine", prefill.engine, decode.engine),
        ("engine version", prefill.engine_version, decode.engine_version),
        ("kv transfer", _transceiver_kind(prefill), _transceiver_kind(decode)),
        ("checkpoint", prefill.checkpoint or decode.checkpoint, decode.checkpoint or prefill.checkpoint),
    ):
        if left != right:
            return f"{prefill.worker_id} -> {decode.worker_id}: {name} {left} is not {right}"
    if prefill.kv_layout != decode.kv_layout:
        difference = _difference(prefill.kv_layout, decode.kv_layout)
        return f"{prefill.worker_id} -> {decode.worker_id}: {difference}"
    return None


def refused_pairs(workers: Sequence[WorkerInfo]) -> list[str]:
    """The reason for every pair of one model that cannot exchange KV."""
    prefills = [worker for worker in workers if worker.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.role is Role.DECODE]
    reasons = [why_not_paired(p, d) for p in prefills for d in decodes if p.model == d.model]
    return [reason for reason in reasons if reason is not None]


def _transceiver_kind(worker: WorkerInfo) -> str:
    return worker.kv_transfer.split(" ")[0] or "none"


def _difference(prefill: KvLayout | None, decode: KvLayout | None) -> str:
    """All fields that differ, so that they can be fixed at once."""
    if prefill is None or decode is None:
        return f"kv layout {prefill} is not {decode}"
    left, right = msgspec.structs.asdict(prefill), msgspec.structs.asdict(decode)
    return ", ".join(
        f"{name} {left[name]} is not {right[name]}" for name in left if left[name] != right[name]
    )
