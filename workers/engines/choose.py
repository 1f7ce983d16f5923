"""Selects the engine if --engine is missing, by the YAML's keys and the installed packages."""

import dataclasses
import importlib.util
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from baton.flags import Parsed
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.trtllm.settings import RENAMED
from workers.flags import EngineName, WorkerSettings
from workers.settings import read
from workers.settings_text import SettingsError

# Enough of the libraries' hundreds of keys to distinguish their YAMLs from others.
_TRTLLM_KEYS = """
attention_dp_config backend cache_transceiver_config cuda_graph_config disable_overlap_scheduler
enable_attention_dp enable_autotuner enable_chunked_prefill enable_iter_perf_stats enable_min_latency
guided_decoding_backend kv_cache_config max_batch_size max_beam_width max_num_tokens max_queue_size
max_seq_len moe_config moe_expert_parallel_size num_postprocess_workers pipeline_parallel_size print_iter_log
stream_interval tensor_parallel_size torch_compile_config trust_remote_code
"""
_VLLM_KEYS = """
block_size compilation_config enable_expert_parallel enable_prefix_caching enforce_eager
gpu_memory_utilization kv_transfer_config max_model_len max_num_batched_tokens max_num_seqs max_queue_size
quantization scheduling_policy structured_outputs_config tensor_parallel_size
"""
CHOSEN = "chosen"  # the source of an engine that was not given


class _Candidate(NamedTuple):
    label: str
    package: str
    keys: Set[str]
    remedy: str


# Not the mocker, which generates no real answers and must be requested.
_CANDIDATES: dict[EngineName, _Candidate] = {
    "trtllm": _Candidate(
        "TensorRT-LLM",
        "tensorrt_llm",
        RENAMED.keys() | set(_TRTLLM_KEYS.split()),
        "run this in the worker image (deploy/README.md)",
    ),
    "vllm": _Candidate("vLLM", "vllm", set(_VLLM_KEYS.split()), "pip install '.[vllm]'"),
    "embedded": _Candidate(
        "the embedded engine",
        "transformers",
        {field.name for field in dataclasses.fields(EmbeddedSettings)},
        "pip install '.[embedded]'",
    ),
}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def with_engine(
    parsed: Parsed[WorkerSettings], is_installed: Callable[[str], bool] = _is_installed
) -> Parsed[WorkerSettings]:
    """The settings with the given engine, or else the one that fits. Raises SettingsError.

    The engines that have the most keys of the YAML fit; without a YAML all do. Among those that fit and are
    installed, the embedded one comes last; between TensorRT-LLM and vLLM the user has to choose.
    """
    if parsed.settings.engine is not None:
        return parsed
    path = parsed.settings.extra_engine_args
    fitting = _fitting(path)
    installed = [name for name in fitting if is_installed(_CANDIDATES[name].package)]
    if not installed:
        raise SettingsError(_missing(path, fitting))
    if {"trtllm", "vllm"} <= set(installed):
        raise SettingsError("TensorRT-LLM and vLLM are both installed; set --engine trtllm or --engine vllm")
    settings = dataclasses.replace(parsed.settings, engine=installed[0])
    return Parsed(settings, parsed.sources | {"engine": CHOSEN})


def _fitting(path: Path | None) -> list[EngineName]:
    """In order of preference. An unreadable file fits all engines: the engine's loader reports it."""
    try:
        keys = {leaf.partition(".")[0] for leaf in read(None, path, {})}
    except SettingsError:
        keys = set()
    num_known = {name: len(keys & candidate.keys) for name, candidate in _CANDIDATES.items()}
    return [name for name, known in num_known.items() if known == max(num_known.values())]


def _missing(path: Path | None, fitting: list[EngineName]) -> str:
    candidates = [_CANDIDATES[name] for name in fitting]
    labels = " or ".join(candidate.label for candidate in candidates)
    remedies = ", or ".join(candidate.remedy for candidate in candidates)
    return (
        f"{path or 'without --engine'}: needs {labels}, which is not installed; {remedies}, "
        "or set --engine and use a YAML of that engine"
    )
