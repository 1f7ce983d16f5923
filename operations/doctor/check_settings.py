"""Checks of each worker's effective engine settings (flags over YAML)."""

from collections.abc import Iterator

from operations.doctor.facts import Facts, Worker
from operations.doctor.findings import Finding, error, note, warning

_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_GRAPHS = "cuda_graph_config.max_batch_size"
_GREEDY = 0.95


def alone(facts: Facts) -> Iterator[Finding]:
    """Check each worker's settings by themselves."""
    for worker in facts.workers:
        yield from _flags(worker)
        yield from _values(worker)
        yield from _sizes(facts, worker)
        yield from _parallelism(facts, worker)


def _flags(worker: Worker) -> Iterator[Finding]:
    if worker.refusal is not None:
        yield error(
            "settings-refused", f"{worker.mode}: {worker.refusal}",
            breaks=f"the {worker.mode} worker exits at start with this error",
            repair="change or remove the named setting; engine_configs/README.md lists the keys",
        )  # fmt: skip
    if worker.overruled:
        pairs = (
            f"{key} {worker.value(key)} (flag), {value} ({place})"
            for key, (value, place) in worker.overruled.items()
        )
        yield note(
            "flag-over-yaml", f"{worker.mode}: {'; '.join(pairs)}",
            breaks="nothing: the flag wins; but Dynamo, given the same, would use the file's value",
            repair="omit the flag, or set its value in the file",
        )  # fmt: skip


def _values(worker: Worker) -> Iterator[Finding]:
    fraction = worker.number(_FRACTION) or 0
    if fraction >= 1:
        yield error(
            "kv-fraction", f"{worker.place(_FRACTION)} {fraction!r} is not below 1",
            breaks="no memory is left for activations",
            repair=f"{_FRACTION}: 0.85",
        )  # fmt: skip
    elif fraction > _GREEDY:
        yield warning(
            "kv-greedy", f"{worker.place(_FRACTION)} {fraction!r} leaves little memory",
            breaks="CUDA out of memory when a long prompt or a transfer needs room",
            repair=f"{_FRACTION}: 0.9, or 0.85 with a transceiver",
        )  # fmt: skip


def _sizes(facts: Facts, worker: Worker) -> Iterator[Finding]:
    batch, graphs = worker.number("max_batch_size"), worker.number(_GRAPHS)
    if batch is not None and graphs is not None and batch > graphs:
        yield warning(
            "batch-graphs", f"{worker.mode}: max_batch_size {int(batch)}, CUDA graphs up to {int(graphs)}",
            breaks="larger batches run without graphs: tokens take longer exactly under full load",
            repair=f"{_GRAPHS}: {int(batch)}, or max_batch_size: {int(graphs)}",
        )  # fmt: skip
    room = worker.number("max_num_tokens")
    if batch is not None and room is not None and batch > room:
        yield warning(
            "batch-tokens", f"{worker.mode}: max_batch_size {int(batch)} is above max_num_tokens {int(room)}",
            breaks="a step has fewer tokens than the batch has requests: the batch never fills",
            repair=f"max_num_tokens: {max(8192, int(batch))}",
        )  # fmt: skip
    longest, shape = worker.number("max_seq_len"), facts.model.shape
    if longest is not None and shape is not None and longest > shape.max_positions:
        yield warning(
            "beyond-context", f"{worker.mode}: max_seq_len {int(longest):,} is above the model's context, "
            f"{shape.max_positions:,}",
            breaks="the engine exits at start, or answers degenerate beyond the context",
            repair=f"max_seq_len: {shape.max_positions}",
        )  # fmt: skip
    unchunked = not worker.is_on("enable_chunked_prefill")
    if longest is not None and unchunked and (room or 8192) < longest and facts.wants_tensorrt_llm:
        yield (error if worker.mode == "prefill" else warning)(
            "prompt-chunks", f"{worker.mode}: max_num_tokens {int(room or 8192):,} is below max_seq_len "
            f"{int(longest):,}, and enable_chunked_prefill is not true",
            breaks="prompts longer than max_num_tokens are refused",
            repair="enable_chunked_prefill: true",
        )  # fmt: skip


def _parallelism(facts: Facts, worker: Worker) -> Iterator[Finding]:
    shape, size = facts.model.shape, worker.tensor_parallel_size
    if shape is None:
        return
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        yield error(
            "tp-heads", f"{worker.mode}: tensor_parallel_size {size} does not fit {heads} heads and "
            f"{kv_heads} KV heads",
            breaks="the engine exits at start",
            repair="tensor_parallel_size: 1, 2, 4 or 8",
        )  # fmt: skip
    expert = max(1, int(worker.number("moe_expert_parallel_size") or 1))
    if size % expert or (shape.num_experts and shape.num_experts % expert):
        yield error(
            "ep-experts", f"{worker.mode}: moe_expert_parallel_size {expert} does not divide "
            f"tensor_parallel_size {size} and {shape.num_experts} experts",
            breaks="the engine exits at start",
            repair=f"moe_expert_parallel_size: {size}",
        )  # fmt: skip
