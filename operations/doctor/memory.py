"""Estimates of GPU memory: do weights, KV cache and transfer buffers fit? Engines find out late."""

import msgspec

from operations.doctor.facts import GIB, Facts, Gpu, Worker

_DEFAULT_FRACTION = 0.9
# Activations, CUDA graphs, NCCL and cuBLAS workspaces, per GPU: a rough, low estimate.
_RESERVE_BYTES = 3 * GIB
# In unified memory, the page cache of the files just read counts as used: in the guide's DGX Spark log,
# 50 GiB are "outside torch" after 61 GiB of weights, about 6 of them from before loading.
_PAGE_CACHE_SHARE = 0.7


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a worker's tightest GPU. `kv_tokens` counts for the whole worker, `request_tokens` for one
    request: with attention data parallelism a request is on one GPU with all its heads; otherwise heads are
    split.
    """

    worker: Worker
    gpu: Gpu
    weight_bytes: int
    free_bytes: int
    bytes_per_token: float
    kv_bytes: int
    kv_tokens: int
    request_tokens: int

    @property
    def need(self) -> str:
        """What it needs at least, for messages."""
        weights, reserve = self.weight_bytes / GIB, _RESERVE_BYTES / GIB
        return f"{self.worker.mode}: {weights:.1f} GiB of weights, {reserve:.1f} GiB of working memory"

    @property
    def max_seq_len(self) -> float | None:
        """The longest request, if given."""
        return self.worker.number("max_seq_len")

    @property
    def fitting_length(self) -> int:
        """The longest request that fits, in blocks."""
        return self.request_tokens // 32 * 32

    @property
    def has_room(self) -> bool:
        """Whether weights and working memory fit."""
        return self.weight_bytes + _RESERVE_BYTES <= self.free_bytes

    def __str__(self) -> str:
        return (
            f"{self.worker.mode}: TP {self.worker.tensor_parallel_size}, per GPU "
            f"{self.weight_bytes / GIB:.1f} GiB of weights and about {self.kv_bytes / GIB:.1f} GiB of KV; "
            f"in total {self.kv_tokens:,} tokens of {self.bytes_per_token:,.0f} bytes"
        )


def budget(facts: Facts, worker: Worker) -> Budget | None:
    """The estimate for the worker's tightest GPU; None without GPU, model shape or weights."""
    gpus, shape = facts.gpus_of(worker), facts.model.shape
    if not gpus or shape is None or not facts.model.weight_bytes or not facts.wants_gpus:
        return None
    tensor_ranks = worker.tensor_parallel_size
    gpu = min(gpus[:tensor_ranks], key=facts.free_bytes)
    weight_bytes = facts.model.weight_bytes // worker.num_ranks
    cached_bytes = int(weight_bytes * _PAGE_CACHE_SHARE) if gpu.free_bytes is None else 0
    left = max(0, facts.free_bytes(gpu) - weight_bytes - cached_bytes - _RESERVE_BYTES)
    fraction = worker.number("kv_cache_config.free_gpu_memory_fraction") or _DEFAULT_FRACTION
    fraction = min(max(fraction, 0.0), 1.0)
    per_token = shape.kv_bytes_per_token(worker.text("kv_cache_config.dtype", "auto"))
    attention_dp = worker.given.get("enable_attention_dp") is True
    # With more ranks than KV heads, heads are replicated.
    per_rank = per_token if attention_dp else per_token / min(tensor_ranks, shape.num_key_value_heads)
    tokens_per_gpu = int(left * fraction / per_rank)
    limit = worker.number("kv_cache_config.max_tokens")
    tokens_per_gpu = min(tokens_per_gpu, int(limit)) if limit else tokens_per_gpu
    return Budget(
        worker=worker,
        gpu=gpu,
        weight_bytes=weight_bytes,
        free_bytes=facts.free_bytes(gpu),
        bytes_per_token=per_token,
        kv_bytes=int(tokens_per_gpu * per_rank),
        kv_tokens=tokens_per_gpu * (tensor_ranks if attention_dp else 1),
        request_tokens=tokens_per_gpu,
    )
