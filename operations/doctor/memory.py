"""Estimates of GPU memory: do the weights and KV caches of a given size fit? Engines find out late."""

from operations.doctor.facts import GIB, Facts, Gpu, Worker

KV_BYTES = "kv_cache_memory_bytes"
"""vLLM's key: the KV cache's size, whatever else is in the GPU's memory."""
SHARE = "gpu_memory_utilization"
"""vLLM's key: the part of the GPU's memory that must be free before it loads."""
# Activations, CUDA graphs, NCCL and cuBLAS workspaces, per GPU: a rough, low estimate.
_RESERVE_BYTES = 3 * GIB
# gpt-oss's published weights by number of layers, for a folder without any (`load_format: dummy`).
_PUBLISHED_BYTES = {24: 13_761_300_000, 36: 65_248_815_744}
# Of one role on a shared GPU; the 20b took 1.7 % more than its files, and 3.3 to 3.9 GiB to work in (H100).
_PADDED = 1.03
_ROLE_BYTES = 4 * GIB
# While vLLM converts experts, by the weights: a role of the 120b was seen with 78 GiB for 61.4 (H200).
_CONVERTED = 0.28
_SPARE_BYTES = 1 * GIB


def halves(facts: Facts, gpu: Gpu) -> dict[str, float]:
    """One GPU for prefill and decode, with vLLM: the settings of each role, which has a copy of the weights,
    working memory with the draft model, and half of what is left for KV. Raises ValueError."""
    model = facts.model
    published = _PUBLISHED_BYTES.get(model.num_layers or 0, 0)
    weight_bytes = int((model.weight_bytes or published) * _PADDED)
    if not weight_bytes:
        raise ValueError(f"{model.path} has no weights, and is not gpt-oss")
    draft_bytes = max((worker.draft_bytes for worker in facts.workers), default=0)
    role_bytes = _ROLE_BYTES + int(draft_bytes * _PADDED)
    free_bytes = gpu.free_bytes
    kv_bytes = (free_bytes - _SPARE_BYTES) // 2 - weight_bytes - role_bytes
    work_bytes = max(role_bytes, int(weight_bytes * _CONVERTED))
    needed_bytes = 2 * (weight_bytes + work_bytes) + _SPARE_BYTES
    if needed_bytes >= free_bytes:
        parts = (weight_bytes, work_bytes, _SPARE_BYTES, needed_bytes, free_bytes)
        weights, work, spare, needed, free = (f"{num_bytes / GIB:.1f} GiB" for num_bytes in parts)
        raise ValueError(
            f"2 x ({weights} of weights + {work} of working memory) + {spare} = {needed}, "
            f"but {free} of GPU {gpu.index} ({gpu.name}) are free; --agg loads one copy"
        )
    share = (weight_bytes + role_bytes + kv_bytes) / gpu.total_bytes
    return {SHARE: int(share * 1000) / 1000, KV_BYTES: kv_bytes}


def shortage(facts: Facts, worker: Worker) -> str | None:
    """What the worker needs at least on its tightest GPU, if less is free there beside the workers with KV
    caches of a given size."""
    gpus = facts.gpus_of(worker)[: worker.tensor_parallel_size]
    if not gpus or not facts.model.weight_bytes or not facts.wants_gpus:
        return None
    gpu = min(gpus, key=lambda each: each.free_bytes)
    others = [w for w in facts.workers if w is not worker and gpu in facts.gpus_of(w) and w.number(KV_BYTES)]
    needs, taken = _needs(facts, worker), sum(sum(_needs(facts, other)) for other in others)
    free_bytes = max(0, gpu.free_bytes - taken)
    if sum(needs) <= free_bytes:
        return None
    weights, reserve, kv, free = (f"{num_bytes / GIB:.1f} GiB" for num_bytes in (*needs, free_bytes))
    return (
        f"{weights} of weights, {reserve} of working memory, {kv} of KV, "
        f"but {free} of GPU {gpu.index} are free for it"
    )


def _needs(facts: Facts, worker: Worker) -> tuple[int, int, int]:
    """Bytes of weights, working memory and KV, on each GPU of a worker."""
    num_gpus = worker.tensor_parallel_size * (worker.number("pipeline_parallel_size") or 1)
    weight_bytes = (facts.model.weight_bytes + worker.draft_bytes) // num_gpus
    return weight_bytes, _RESERVE_BYTES, worker.number(KV_BYTES)
