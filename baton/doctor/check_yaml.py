"""Checks of the engine YAMLs: readable, sensible alone, and prefill's against decode's."""

from collections.abc import Iterator

from baton.doctor.facts import Facts, Worker
from baton.doctor.findings import Finding, error, warning

_OLD_KEYS = {
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "moe_backend": "moe_config.backend",
    "use_cuda_graph": "cuda_graph_config (null turns graphs off)",
    "cuda_graph_max_batch_size": "cuda_graph_config.max_batch_size",
    "cuda_graph_padding_enabled": "cuda_graph_config.enable_padding",
    "pytorch_backend_config": "its keys at top level",
    "autotuner_enabled": "enable_autotuner",
    "torch_compile_enabled": "torch_compile_config",
    "enable_mixed_sampler": "nothing: remove it",
    "build_config": "nothing: remove it",
}
_WHOLE = ("tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size", "max_batch_size",
          "max_num_tokens", "max_seq_len", "kv_cache_config.tokens_per_block",
          "cache_transceiver_config.max_tokens_in_buffer")  # fmt: skip
_FRACTION = "kv_cache_config.free_gpu_memory_fraction"
_BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
_BACKEND = "cache_transceiver_config.backend"
_BACKENDS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")


def alone(facts: Facts) -> Iterator[Finding]:
    """Can each file be read, and do its values make sense by themselves?"""
    for worker in facts.workers:
        if worker.yaml is None:
            continue
        if worker.yaml.problem:
            yield error(
                "yaml-bad", f"{worker.yaml.path}: {worker.yaml.problem}",
                breaks=f"the {worker.role} worker ends at start",
                repair=f"edit {worker.yaml.path}; engine_configs/README.md lists the keys",
            )  # fmt: skip
            continue
        for place in worker.yaml.duplicates:
            yield error(
                "yaml-twice", f"{place} is given twice",
                breaks="one of the two values is silently lost in other tools; Baton refuses the file",
                repair=f"remove one of them from {worker.yaml.path}",
            )  # fmt: skip
        yield from _values(worker, worker.yaml.path)
        yield from _parallelism(facts, worker)
        yield from _moe(facts, worker)


def _values(worker: Worker, path: str) -> Iterator[Finding]:
    assert worker.yaml is not None
    for old, new in _OLD_KEYS.items():
        if any(key == old or key.startswith(old + ".") for key in worker.yaml.values):
            yield error(
                "yaml-old-key", f"{path}: {old} is a key of older releases",
                breaks="TensorRT-LLM 1.3 refuses the file: invalid argument",
                repair=f"write {new}",
            )  # fmt: skip
    for key in _WHOLE:
        value = worker.yaml.values.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            yield error(
                "yaml-value", f"{path}: {key}: {value!r} is no whole number above 0",
                breaks=f"the {worker.role} worker ends at start",
                repair=f"give {key} a number",
            )  # fmt: skip
    fraction = worker.yaml.values.get(_FRACTION)
    if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction < 1):
        yield error(
            "kv-fraction", f"{path}: {_FRACTION}: {fraction!r} is not between 0 and 1",
            breaks="no memory is left to compute in, or the worker ends at start",
            repair=f"{_FRACTION}: 0.85",
        )  # fmt: skip


def _parallelism(facts: Facts, worker: Worker) -> Iterator[Finding]:
    shape, size = facts.model.shape, worker.tensor_parallel_size
    if shape is None:
        return
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        yield error(
            "tp-heads", f"{worker.role}: tensor_parallel_size {size}, {heads} heads, {kv_heads} KV heads",
            breaks="the engine ends at start",
            repair="tensor_parallel_size: 1, 2, 4 or 8",
        )  # fmt: skip
    if worker.typed_tensor_parallel_size:
        return  # the expert parallel size is typed with it, and not known here
    expert = max(1, int(worker.number("moe_expert_parallel_size") or 1))
    if size % expert or (shape.num_experts and shape.num_experts % expert):
        yield error(
            "ep-experts", f"{worker.role}: moe_expert_parallel_size {expert} does not divide "
            f"tensor_parallel_size {size} and {shape.num_experts} experts",
            breaks="the engine ends at start",
            repair=f"moe_expert_parallel_size: {size}",
        )  # fmt: skip


def _moe(facts: Facts, worker: Worker) -> Iterator[Finding]:
    backend = worker.text("moe_config.backend", "AUTO")
    if not backend.isupper():
        yield error(
            "moe-case", f"{worker.role}: moe_config.backend: {backend} is not upper case",
            breaks="TensorRT-LLM refuses the value",
            repair=f"moe_config.backend: {backend.upper()}",
        )  # fmt: skip
        return
    gpus = facts.gpus_of(worker)
    hopper = bool(gpus) and facts.wants_gpus and gpus[0].compute[0] == 9
    if hopper and backend == "TRTLLM":
        yield error(
            "moe-hopper", f"{worker.role}: moe_config.backend: TRTLLM on a {gpus[0].name}",
            breaks="those kernels exist for Blackwell only: the engine ends at start",
            repair="moe_config.backend: TRITON",
        )  # fmt: skip
    elif hopper and backend == "CUTLASS":
        yield warning(
            "moe-hopper", f"{worker.role}: moe_config.backend: CUTLASS on a {gpus[0].name}",
            breaks="MXFP4 experts run slowly or not at all: the guide asks for Triton kernels on Hopper",
            repair="moe_config.backend: TRITON",
        )  # fmt: skip


def pair(facts: Facts) -> Iterator[Finding]:
    """Can KV that this prefill worker makes be taken over by this decode worker?"""
    prefill, decode = facts.role("prefill"), facts.role("decode")
    for worker in (prefill, decode):
        if worker and worker.yaml and not worker.yaml.problem:
            yield from _transceiver(facts, worker)
    if prefill and prefill.yaml and facts.wants_gpus and not prefill.is_on("disable_overlap_scheduler"):
        yield error(
            "overlap-prefill", f"{prefill.yaml.path}: disable_overlap_scheduler is not true",
            breaks="TensorRT-LLM's prefill side does not work with the overlap scheduler: hand-offs hang",
            repair="disable_overlap_scheduler: true",
        )  # fmt: skip
    if prefill and decode and prefill.yaml and decode.yaml:
        yield from _equal(prefill, decode)
        yield from _lengths(prefill, decode)


def _transceiver(facts: Facts, worker: Worker) -> Iterator[Finding]:
    assert worker.yaml is not None
    path, backend = worker.yaml.path, worker.text(_BACKEND, "")
    if not backend:
        if facts.wants_gpus:
            yield error(
                "transceiver-none", f"{path}: no {_BACKEND}",
                breaks="TensorRT-LLM turns KV transfer off: no hand-off works",
                repair="cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 65536}",
            )  # fmt: skip
        return
    if backend.upper() not in _BACKENDS:
        yield error(
            "transceiver-unknown", f"{path}: {_BACKEND}: {backend} (known: {', '.join(_BACKENDS)})",
            breaks=f"the {worker.role} worker ends at start",
            repair=f"{_BACKEND}: UCX",
        )  # fmt: skip
    elif backend != backend.upper():
        yield warning(
            "transceiver-case", f"{path}: {_BACKEND}: {backend} is the spelling of older releases",
            breaks="Baton writes it in upper case; trtllm-serve and Dynamo with TensorRT-LLM 1.3 refuse it",
            repair=f"{_BACKEND}: {backend.upper()}",
        )  # fmt: skip
    if facts.wants_gpus:
        yield from _buffer(facts, worker, path)


def _buffer(facts: Facts, worker: Worker, path: str) -> Iterator[Finding]:
    context = facts.model.shape.max_positions if facts.model.shape else 131_072
    longest, room = int(worker.number("max_seq_len") or context), worker.number(_BUFFER)
    if room is None:
        yield warning(
            "buffer-unset", f"{path}: {_BUFFER} is not set",
            breaks="transfers of long prompts go through a small default buffer: slow, or they stall",
            repair=f"{_BUFFER}: {longest}",
        )  # fmt: skip
    elif room < longest:
        yield error(
            "buffer-short", f"{path}: {_BUFFER} {int(room):,} is below the longest prompt, {longest:,}",
            breaks="a longer prompt stalls prefill and decode for ever (Dynamo #4327)",
            repair=f"{_BUFFER}: {longest}, or max_seq_len: {int(room)} in both files",
        )  # fmt: skip


def _equal(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    for code, key, default, upper in (
        ("pair-dtype", "kv_cache_config.dtype", "auto", False),
        ("pair-block", "kv_cache_config.tokens_per_block", "32", False),
        ("pair-backend", _BACKEND, "", True),
        ("pair-runtime", "cache_transceiver_config.transceiver_runtime", "auto", False),
    ):
        one, other = prefill.text(key, default), decode.text(key, default)
        same = one.upper() == other.upper() if upper else one == other
        if not same and one and other:
            yield error(
                code, f"{key}: {one} on prefill, {other} on decode",
                breaks="the pair is refused: neither can read the other's KV blocks",
                repair=f"write the same {key} in both files",
            )  # fmt: skip
    for worker in (prefill, decode):
        if (worker.number("max_beam_width") or 1) > 1:
            yield error(
                "pair-beam", f"{worker.role}: max_beam_width is above 1",
                breaks="KV transfer knows no beam search",
                repair="max_beam_width: 1",
            )  # fmt: skip


def _lengths(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    one, other = prefill.number("max_seq_len"), decode.number("max_seq_len")
    if one is not None and other is not None and other < one:
        yield error(
            "pair-length", f"max_seq_len: {int(one):,} on prefill, {int(other):,} on decode",
            breaks="decode refuses requests that prefill has already worked on",
            repair=f"max_seq_len: {int(one)} in decode's file",
        )  # fmt: skip
    room = prefill.number("max_num_tokens") or 8192
    if one is not None and room < one and not prefill.is_on("enable_chunked_prefill"):
        yield error(
            "prefill-chunks", f"prefill: max_num_tokens {int(room):,} is below max_seq_len {int(one):,}, "
            "and enable_chunked_prefill is not true",
            breaks="prompts longer than max_num_tokens are refused",
            repair="enable_chunked_prefill: true",
        )  # fmt: skip
