"""Reads the flags that are typed to a worker: those that stand for engine settings, by key path."""

import shlex
from collections.abc import Callable

_FLAGS: dict[str, tuple[str, Callable[[str], int | float]]] = {
    "--max-batch-size": ("max_batch_size", int),
    "--max-num-tokens": ("max_num_tokens", int),
    "--max-seq-len": ("max_seq_len", int),
    "--free-gpu-memory-fraction": ("kv_cache_config.free_gpu_memory_fraction", float),
    "--tensor-parallel-size": ("tensor_parallel_size", int),
    "--expert-parallel-size": ("moe_expert_parallel_size", int),
}
FLAG_OF = {path: name for name, (path, _) in _FLAGS.items()}


def read_flags(line: str) -> tuple[dict[str, object], tuple[str, ...]]:
    """(settings, problems) of a command line; the last of two equal flags counts, other flags are skipped."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        return {}, (f"{line}: {error}",)
    settings: dict[str, object] = {}
    problems: list[str] = []
    for position, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name not in _FLAGS:
            continue
        if not has_value:
            value = words[position + 1] if position + 1 < len(words) else ""
        path, kind = _FLAGS[name]
        try:
            settings[path] = kind(value)
        except ValueError:
            problems.append(f"{name} {value}".rstrip())
    return settings, tuple(problems)
