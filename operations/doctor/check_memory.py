"""Estimates of GPU memory: do weights, KV cache and transfer buffers fit? Engines find out late."""

from collections.abc import Iterator

import msgspec

from operations.doctor.facts import GIB, Facts, Gpu, Worker
from operations.doctor.findings import Finding, error, warning

_DEFAULT_FRACTION = 0.9
_THIN_TOKENS = 512
# Activations, CUDA graphs, NCCL and cuBLAS workspaces, per GPU: a rough, low estimate.
_RESERVE_BYTES = 3 * GIB
# In unified memory, the page cache of the files just read counts as used: in the guide's DGX Spark log,
# 50 GiB are "outside torch" after 61 GiB of weights, about 6 of them from before loading.
_PAGE_CACHE_SHARE = 0.7


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a worker's GPU. `kv_tokens` counts for the whole worker, `request_tokens` for one request.

    With attention data parallelism a request is on one GPU with all its heads; otherwise heads are split.
    """

    gpu: Gpu
    weight_bytes: int
    free_bytes: int
    kv_bytes: int
    headroom_bytes: int
    buffer_bytes: int
    kv_tokens: int
    request_tokens: int


def budget(facts: Facts, worker: Worker) -> Budget | None:
    """The estimate for the worker's tightest GPU; None without GPU, model shape or weights."""
    gpus, shape = facts.gpus_of(worker), facts.model.shape
    if not gpus or shape is None or not facts.model.weight_bytes or not facts.wants_gpus:
        return None
    num_ranks = worker.tensor_parallel_size
    gpu = min(gpus[:num_ranks], key=facts.free_bytes)
    weight_bytes = facts.model.weight_bytes // (num_ranks * worker.pipeline_parallel_size)
    cached_bytes = int(weight_bytes * _PAGE_CACHE_SHARE) if gpu.free_bytes is None else 0
    left = max(0, facts.free_bytes(gpu) - weight_bytes - cached_bytes - _RESERVE_BYTES)
    fraction = worker.number("kv_cache_config.free_gpu_memory_fraction") or _DEFAULT_FRACTION
    fraction = min(max(fraction, 0.0), 1.0)
    per_token = shape.kv_bytes_per_token(worker.text("kv_cache_config.dtype", "auto"))
    attention_dp = worker.is_on("enable_attention_dp")
    # With more ranks than KV heads, heads are replicated.
    per_rank = per_token if attention_dp else per_token / min(num_ranks, shape.num_kv_heads)
    tokens_per_gpu = int(left * fraction / per_rank)
    limit = worker.number("kv_cache_config.max_tokens")
    tokens_per_gpu = min(tokens_per_gpu, int(limit)) if limit else tokens_per_gpu
    buffer_tokens = worker.number("cache_transceiver_config.max_tokens_in_buffer") or 0
    return Budget(
        gpu=gpu,
        weight_bytes=weight_bytes,
        free_bytes=facts.free_bytes(gpu),
        kv_bytes=int(tokens_per_gpu * per_rank),
        headroom_bytes=int(left * (1 - fraction)) + _RESERVE_BYTES,
        buffer_bytes=int(2 * buffer_tokens * per_rank),  # one per direction
        kv_tokens=tokens_per_gpu * (num_ranks if attention_dp else 1),
        request_tokens=tokens_per_gpu,
    )


def memory(facts: Facts) -> Iterator[Finding]:
    """Do weights, the longest request, the batch and the transfer buffer fit each worker's GPUs?"""
    for worker in facts.workers:
        held = budget(facts, worker)
        if held is None:
            continue
        if held.weight_bytes + _RESERVE_BYTES > held.free_bytes:
            yield _no_room(facts, worker, held)
            continue
        yield from _kv(facts, worker, held)
        if held.buffer_bytes > held.headroom_bytes:
            yield error(
                "buffer-memory", f"{worker.mode}: max_tokens_in_buffer needs {_gib(held.buffer_bytes)}, "
                f"but the KV cache leaves {_gib(held.headroom_bytes)} on GPU {held.gpu.index}",
                breaks="out of memory at the first transfers (TensorRT-LLM #13506)",
                repair="kv_cache_config.free_gpu_memory_fraction: 0.8, or a smaller max_tokens_in_buffer",
            )  # fmt: skip


def _no_room(facts: Facts, worker: Worker, held: Budget) -> Finding:
    fits_when_free = held.weight_bytes + _RESERVE_BYTES <= facts.total_bytes(held.gpu)
    need = f"{worker.mode}: {_gib(held.weight_bytes)} of weights, {_gib(_RESERVE_BYTES)} of working memory"
    if fits_when_free:
        return error(
            "memory-taken", f"{need}, but {_gib(held.free_bytes)} free on GPU {held.gpu.index}",
            breaks="CUDA out of memory while loading",
            repair=f"nvidia-smi --id={held.gpu.index} --query-compute-apps=pid,name --format=csv; stop it",
        )  # fmt: skip
    return error(
        "memory-weights", f"{need}, but GPU {held.gpu.index} has {_gib(facts.total_bytes(held.gpu))}",
        breaks="CUDA out of memory while loading",
        repair="more GPUs for this worker (tensor_parallel_size), or gpt-oss-20b",
    )  # fmt: skip


def _kv(facts: Facts, worker: Worker, held: Budget) -> Iterator[Finding]:
    assert facts.model.shape is not None
    longest = worker.number("max_seq_len")
    context = facts.model.shape.max_positions
    if longest is not None and held.request_tokens < longest:
        yield error(
            "kv-one-request", f"{worker.mode}: KV cache for {held.request_tokens:,} tokens of one request, "
            f"but max_seq_len is {int(longest):,}",
            breaks="TensorRT-LLM lowers max_seq_len: longer requests are refused",
            repair=f"max_seq_len: {held.request_tokens // 32 * 32}, a larger fraction, or more GPUs",
        )  # fmt: skip
    elif longest is None and held.request_tokens < context:
        yield warning(
            "kv-below-context", f"{worker.mode}: KV cache for {held.request_tokens:,} tokens, the model's "
            f"context is {context:,}, and max_seq_len is not set",
            breaks="TensorRT-LLM lowers max_seq_len, differently on prefill and decode",
            repair=f"max_seq_len: {held.request_tokens // 32 * 32} in the engine YAML of every worker",
        )  # fmt: skip
    batch = worker.number("max_batch_size") or 1
    if worker.is_on("enable_attention_dp"):
        batch *= worker.tensor_parallel_size  # the setting counts per GPU
    if held.kv_tokens / batch < _THIN_TOKENS:
        yield warning(
            "kv-thin", f"{worker.mode}: {int(batch)} concurrent requests share {held.kv_tokens:,} KV tokens: "
            f"{int(held.kv_tokens / batch)} each",
            breaks="most of the batch waits for KV blocks; CUDA graphs and buffers of that size are wasted",
            repair=f"max_batch_size: {max(1, int(held.kv_tokens / 2048 * _per_gpu(worker)))}",
        )  # fmt: skip


def _per_gpu(worker: Worker) -> float:
    """The part of a worker's requests that max_batch_size counts: one GPU's under attention DP, else all."""
    return 1 / worker.tensor_parallel_size if worker.is_on("enable_attention_dp") else 1.0


def seen(facts: Facts, worker: Worker) -> str | None:
    """The estimate in one line, for comparison with the engine's log."""
    held = budget(facts, worker)
    if held is None or facts.model.shape is None:
        return None
    per_token = facts.model.shape.kv_bytes_per_token(worker.text("kv_cache_config.dtype", "auto"))
    return (
        f"{worker.mode}: TP {worker.tensor_parallel_size}, per GPU {_gib(held.weight_bytes)} of weights and "
        f"about {_gib(held.kv_bytes)} of KV; in total {held.kv_tokens:,} tokens of {per_token:,.0f} bytes"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
