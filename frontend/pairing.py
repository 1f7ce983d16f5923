"""Which prefill worker can hand its KV to which decode worker."""

from baton.messages import Role, WorkerInfo


def why_not_paired(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why the KV of one cannot go to the other, naming both values; None if it can."""
    for name, left, right in (
        ("engine", prefill.engine, decode.engine),
        ("engine version", prefill.engine_version, decode.engine_version),
        ("kv layout", prefill.kv_layout, decode.kv_layout),
        ("kv transfer", prefill.kv_transfer.split(" ")[0], decode.kv_transfer.split(" ")[0]),
    ):
        if left != right:
            return f"{prefill.worker_id} -> {decode.worker_id}: {name} {left} is not {right}"
    return None


def refused_pairs(workers: tuple[WorkerInfo, ...]) -> list[str]:
    """The reason for every pair of one model that cannot work together."""
    prefills = [worker for worker in workers if worker.role is Role.PREFILL]
    decodes = [worker for worker in workers if worker.role is Role.DECODE]
    reasons = [why_not_paired(p, d) for p in prefills for d in decodes if p.model == d.model]
    return [reason for reason in reasons if reason is not None]
