"""Selects the engine if --engine is missing, by the YAML's keys and the installed packages."""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

from baton.doctor.engine_yaml import read_engine_yaml
from baton.doctor.trtllm_keys import KEYS, OLD_KEYS
from baton.flags import Parsed
from workers.config import EngineName, WorkerSettings
from workers.engines.embedded.settings import EmbeddedSettings
from workers.settings import SettingsError

# Enough of vLLM's 200 keys to tell its YAMLs from others.
_VLLM_KEYS = """
block_size compilation_config enable_expert_parallel enable_prefix_caching enforce_eager
gpu_memory_utilization kv_transfer_config max_model_len max_num_batched_tokens max_num_seqs quantization
scheduling_policy structured_outputs_config tensor_parallel_size
"""
CHOSEN = "chosen"  # the source of an engine that was not given


@dataclasses.dataclass(frozen=True)
class _Candidate:
    label: str
    package: str
    keys: frozenset[str]
    remedy: str


# Not the mocker, which generates no real answers and must be requested.
_CANDIDATES: dict[EngineName, _Candidate] = {
    "trtllm": _Candidate(
        "TensorRT-LLM",
        "tensorrt_llm",
        KEYS[""] | OLD_KEYS.keys(),
        "run this in the worker image (deploy/README.md)",
    ),
    "vllm": _Candidate(
        "vLLM",
        "vllm",
        frozenset(_VLLM_KEYS.split()),
        "pip install '.[vllm]'",
    ),
    "embedded": _Candidate(
        "the embedded engine",
        "transformers",
        frozenset(field.name for field in dataclasses.fields(EmbeddedSettings)),
        "pip install '.[embedded]'",
    ),
}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def with_engine(
    parsed: Parsed[WorkerSettings], is_installed: Callable[[str], bool] = _is_installed
) -> Parsed[WorkerSettings]:
    """The settings with the given engine, or else the one that fits. Raises SettingsError.

    The engines that know the most keys of the YAML fit; without a YAML all do. Among those that fit and are
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
    leaves = read_engine_yaml(path).values if path is not None else {}
    keys = {leaf.partition(".")[0] for leaf in leaves}
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
