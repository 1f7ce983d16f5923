"""Estimates of GPU memory: do weights, KV cache and transfer buffers fit? Engines find out late."""

import msgspec

from operations.doctor.facts import GIB, Facts, Gpu, Model, Worker
from workers.engines.vllm.patches import SHARED_WEIGHTS

KV_BYTES = "kv_cache_memory_bytes"
"""vLLM's key: the KV cache's size, whatever else is in the GPU's memory."""
_DEFAULT_FRACTION = 0.9
# Activations, CUDA graphs, NCCL and cuBLAS workspaces, per GPU: a rough, low estimate.
_RESERVE_BYTES = 3 * GIB
# In unified memory, the page cache of the files just read counts as used: in the guide's DGX Spark log,
# 50 GiB are "outside torch" after 61 GiB of weights, about 6 of them from before loading.
_PAGE_CACHE_SHARE = 0.7
# gpt-oss's published weights by number of layers, for a folder without any (`load_format: dummy`).
_PUBLISHED_BYTES = {24: 13_761_300_000, 36: 65_248_815_744}
# Of one role on a shared GPU; the 20b took 1.7 % more than its files, and 3.3 to 3.9 GiB to work in (H100).
_PADDED = 1.03
_ROLE_BYTES = 4 * GIB
_SPARE_BYTES = 1 * GIB


class Halves(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU for prefill and decode, with vLLM: each has working memory and half of what the copies of the
    weights leave for KV.
    """

    gpu: Gpu
    total_bytes: int
    free_bytes: int
    weight_bytes: int
    num_copies: int

    @property
    def needed_bytes(self) -> int:
        """Without KV."""
        return self.num_copies * self.weight_bytes + 2 * _ROLE_BYTES + _SPARE_BYTES

    @property
    def kv_bytes(self) -> int:
        """KV cache of each role; not above 0 if the rest does not fit."""
        return (self.free_bytes - self.needed_bytes) // 2

    @property
    def settings(self) -> dict[str, float]:
        """The settings of each role; before vLLM loads, it checks that the first share is free."""
        own_bytes = self.weight_bytes if self.num_copies == 2 else 0
        share = (own_bytes + _ROLE_BYTES + self.kv_bytes) / self.total_bytes
        return {"gpu_memory_utilization": int(share * 1000) / 1000, KV_BYTES: self.kv_bytes}

    def __str__(self) -> str:
        parts = (self.weight_bytes, _ROLE_BYTES, _SPARE_BYTES, self.needed_bytes)
        weights, role, spare, need = (f"{num_bytes / GIB:.1f} GiB" for num_bytes in parts)
        return (
            f"{self.num_copies} x {weights} of weights + 2 x {role} of working memory + {spare} = {need}, "
            f"but {self.free_bytes / GIB:.1f} GiB of GPU {self.gpu.index} ({self.gpu.name}) are free"
        )


def halves(facts: Facts, gpu: Gpu) -> Halves | None:
    """None if neither the folder's weights nor its shape is known."""
    weight_bytes = facts.model.weight_bytes or _published_bytes(facts.model)
    if not weight_bytes:
        return None
    return Halves(
        gpu=gpu,
        total_bytes=facts.total_bytes(gpu),
        free_bytes=facts.free_bytes(gpu),
        weight_bytes=int(weight_bytes * _PADDED),
        num_copies=1 if SHARED_WEIGHTS in facts.host.environment else 2,
    )


def _published_bytes(model: Model) -> int:
    return _PUBLISHED_BYTES.get(model.shape.num_hidden_layers, 0) if model.shape else 0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a worker's tightest GPU. `kv_tokens` counts for the whole worker, `request_tokens` for one
    request: with attention data parallelism a request is on one GPU with all its heads; otherwise heads are
    split.
    """

    worker: Worker
    gpu: Gpu
    weight_bytes: int
    given_bytes: int
    """KV of a given size, whatever is free."""
    free_bytes: int
    """Without what other workers on this GPU take."""
    bytes_per_token: float
    kv_bytes: int
    kv_tokens: int
    request_tokens: int

    @property
    def need(self) -> str:
        """What it needs at least, for messages."""
        weights, reserve = self.weight_bytes / GIB, _RESERVE_BYTES / GIB
        need = f"{self.worker.mode}: {weights:.1f} GiB of weights, {reserve:.1f} GiB of working memory"
        return need + (f", {self.given_bytes / GIB:.1f} GiB of KV" if self.given_bytes else "")

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
        """Whether weights, working memory and a given KV cache fit."""
        return self.weight_bytes + _RESERVE_BYTES + self.given_bytes <= self.free_bytes

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
    free_bytes = max(0, facts.free_bytes(gpu) - _taken_beside(facts, worker, gpu))
    left = max(0, free_bytes - weight_bytes - cached_bytes - _RESERVE_BYTES)
    fraction = worker.number("kv_cache_config.free_gpu_memory_fraction") or _DEFAULT_FRACTION
    fraction = min(max(fraction, 0.0), 1.0)
    per_token = shape.kv_bytes_per_token(worker.text("kv_cache_config.dtype", "auto"))
    attention_dp = worker.given.get("enable_attention_dp") is True
    # With more ranks than KV heads, heads are replicated.
    per_rank = per_token if attention_dp else per_token / min(tensor_ranks, shape.num_key_value_heads)
    given_bytes = kv_bytes_given(worker)
    tokens_per_gpu = int((given_bytes or left * fraction) / per_rank)
    limit = worker.number("kv_cache_config.max_tokens")
    tokens_per_gpu = min(tokens_per_gpu, int(limit)) if limit else tokens_per_gpu
    return Budget(
        worker=worker,
        gpu=gpu,
        weight_bytes=weight_bytes,
        given_bytes=given_bytes,
        free_bytes=free_bytes,
        bytes_per_token=per_token,
        kv_bytes=int(tokens_per_gpu * per_rank),
        kv_tokens=tokens_per_gpu * (tensor_ranks if attention_dp else 1),
        request_tokens=tokens_per_gpu,
    )


def kv_bytes_given(worker: Worker) -> int:
    """The size of its KV cache, if that is given."""
    return max(0, int(worker.number(KV_BYTES) or 0))


def _taken_beside(facts: Facts, worker: Worker, gpu: Gpu) -> int:
    """What workers with KV caches of a given size take on this GPU beside `worker`."""
    others = [w for w in facts.workers if w is not worker and gpu in facts.gpus_of(w) and kv_bytes_given(w)]
    weight_bytes = 0 if SHARED_WEIGHTS in facts.host.environment else facts.model.weight_bytes
    return sum(weight_bytes // w.num_ranks + _RESERVE_BYTES + kv_bytes_given(w) for w in others)
