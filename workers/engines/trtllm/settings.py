"""The keywords for LLM(): flags, override, YAML, and the few values that Baton sets by default."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.handoff import NO_SPECULATION
from workers.engines.queue_size import WithQueueSize
from workers.engines.trtllm.schema import ModelSchema, lacks
from workers.flags import DisaggregationMode
from workers.settings import (
    Given,
    Loaded,
    Schema,
    build,
    put,
    read,
    refuse,
    require_counts,
    require_share,
)
from workers.settings_text import SettingsError

log = logging.getLogger(__name__)

TRANSCEIVER = "cache_transceiver_config"
BACKEND = f"{TRANSCEIVER}.backend"
RUNTIME = f"{TRANSCEIVER}.transceiver_runtime"
TIMEOUT = f"{TRANSCEIVER}.kv_transfer_timeout_ms"
BUFFER = f"{TRANSCEIVER}.max_tokens_in_buffer"
BEAM_WIDTH = "max_beam_width"
OVERLAP_OFF = "disable_overlap_scheduler"
MANAGER_V2 = "kv_cache_config.use_kv_cache_manager_v2"
KV_TIMEOUT_MS = 60_000
# What `auto` resolves to for gpt-oss; explicit, so that the two sides of a pair can be compared.
RUNTIMES = {"UCX": "CPP", "MOONCAKE": "CPP", "MPI": "CPP", "NIXL": "PYTHON"}
_COUNTS = (
    "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "max_beam_width", "stream_interval",
    "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size",
    "kv_cache_config.tokens_per_block", "kv_cache_config.max_tokens", BUFFER, TIMEOUT,
)  # fmt: skip
BATON = "baton"  # the source of Baton's choices

# Keys of older YAMLs and their successors, which TensorRT-LLM's errors do not name.
RENAMED = {
    "kv_cache_free_gpu_memory_fraction": "it is now kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "it is now kv_cache_config.dtype",
    "moe_backend": "it is now moe_config.backend",
    "use_cuda_graph": "leave it out, or set cuda_graph_config: null to disable graphs",
    "cuda_graph_max_batch_size": "it is now cuda_graph_config.max_batch_size",
    "cuda_graph_padding_enabled": "it is now cuda_graph_config.enable_padding",
    "pytorch_backend_config": "its keys are now at the top level",
    "build_config": "its keys are now at the top level",
    "enable_mixed_sampler": "leave it out; the sampler now mixes automatically",
    "autotuner_enabled": "it is now enable_autotuner",
    "torch_compile_enabled": "it is now torch_compile_config",
}
# Settings that a build may lack without harm, and why.
OPTIONAL = {
    RUNTIME: "this build has the C++ runtime only",
    MANAGER_V2: "this build has one KV cache manager only",
    "num_postprocess_workers": "nothing is detokenised in the worker",
    "enable_min_latency": "it affects Llama 4 only",
}


def load_trtllm_settings(
    args: Any,
    mode: DisaggregationMode,
    *,
    yaml_path: Path | None = None,
    override: str | None = None,
    typed: Mapping[str, object] | None = None,
) -> Loaded[dict[str, Any]]:
    """The keywords for LLM(); `args` is the build's settings class (`TorchLlmArgs`).

    Per leaf: flag > override > YAML > Baton's choice > the build's default; `settings` has only given and
    chosen values. Raises SettingsError, also for what cannot work in `mode`.
    """
    schema = WithQueueSize(ModelSchema(args, is_root=True))
    given = give_trtllm_settings(schema, mode, yaml_path=yaml_path, override=override, typed=typed)
    if mode != "agg" and _value(given, BUFFER) is None:
        log.warning("%s is not set: set it to the longest prompt's token count", BUFFER)
    loaded: Loaded[dict[str, Any]] = build(schema, given, str(yaml_path or "engine settings"))
    return loaded


def give_trtllm_settings(
    schema: Schema | None,
    mode: DisaggregationMode,
    *,
    yaml_path: Path | None = None,
    override: str | None = None,
    typed: Mapping[str, object] | None = None,
) -> Given:
    """The given values and Baton's choices, before a build validates them. Without a schema (no build is
    installed) keys and types are not checked. Raises SettingsError for what no build can do in `mode`.
    """
    given = read(schema, yaml_path, typed or {}, override, renamed=RENAMED, optional=OPTIONAL)
    _drop_backend(given)
    require_counts(given, _COUNTS)
    require_share(given, "kv_cache_config.free_gpu_memory_fraction")
    _choose(given, mode)
    if mode != "agg":
        refuse(given, ("speculative_config", "decoding_config"), NO_SPECULATION)
        _check_transfer(given)
        _check_runtime(given, schema)
    if mode == "prefill" and _value(given, OVERLAP_OFF) is False:
        raise SettingsError(
            f"{given[OVERLAP_OFF][1]}: {OVERLAP_OFF}: false: TensorRT-LLM does not support the overlap "
            "scheduler on prefill workers; leave it out"
        )
    return given


def manager(runtime: object, manager_v2: object) -> str:
    """The KV cache manager, `v1` or `v2`, that a worker with these settings runs gpt-oss with; empty if only
    the build can tell.
    """
    if isinstance(manager_v2, bool):
        return "v2" if manager_v2 else "v1"
    return {"CPP": "v1", "PYTHON": "v2"}.get(str(runtime), "") if manager_v2 == "auto" else ""


def _value(given: Given, path: str) -> object:
    return given.get(path, (None, ""))[0]


def _drop_backend(given: Given) -> None:
    """Many YAMLs have `backend: pytorch`: it is the only backend, and LLM() does not take it."""
    value, source = given.pop("backend", ("pytorch", ""))
    if value != "pytorch":
        raise SettingsError(f"{source}: backend: {value!r}: the engine runs with 'pytorch' only")


def _choose(given: Given, mode: DisaggregationMode) -> None:
    """Set what Baton needs and the user has not set; `build` leaves out what the build lacks."""

    def choose(path: str, value: object) -> None:
        if path not in given:
            put(given, path, value, BATON)

    choose("guided_decoding_backend", "xgrammar")
    if mode == "prefill":
        choose(OVERLAP_OFF, True)
    if not any(path.startswith(f"{TRANSCEIVER}.") for path in given):
        return
    if (backend := str(_value(given, BACKEND))) in RUNTIMES:
        choose(RUNTIME, RUNTIMES[backend])
        if _value(given, RUNTIME) == "CPP":
            choose(MANAGER_V2, False)
    choose(TIMEOUT, KV_TIMEOUT_MS)


def _check_transfer(given: Given) -> None:
    backend, runtime = _value(given, BACKEND), _value(given, RUNTIME)
    if backend is None:
        raise SettingsError(
            f"{BACKEND} is not set: prefill and decode workers both need it, e.g. UCX, "
            "or run the worker with --disaggregation-mode agg"
        )
    for path, is_wrong, why in (
        (TIMEOUT, TIMEOUT in given and _value(given, TIMEOUT) is None,
         "null would wait forever for a dead worker; set milliseconds"),
        (RUNTIME, runtime == "PYTHON" and backend not in ("NIXL", "DEFAULT"),
         "PYTHON moves KV over NIXL only; set backend: NIXL, or CPP"),
        (MANAGER_V2, runtime == "CPP" and _value(given, MANAGER_V2) is True,
         "true does not work with the C++ transceiver; leave it out, or set backend: NIXL"),
        (BEAM_WIDTH, _value(given, BEAM_WIDTH) not in (None, 1), "must be 1 for KV transfers"),
    ):  # fmt: skip
        if is_wrong:
            raise SettingsError(f"{given[path][1]}: {path}: {why}")


def _check_runtime(given: Given, schema: Schema | None) -> None:
    """Refuse the C++ transceiver if the installed build has none."""
    for path in (BACKEND, RUNTIME):
        value, source = given.get(path, (None, BATON))
        is_cpp = value == "CPP" or RUNTIMES.get(str(value)) == "CPP"
        if is_cpp and source != BATON and (lacks(schema, path, str(value)) or lacks(schema, RUNTIME, "CPP")):
            raise SettingsError(
                f"{source}: {path}: {value}: this build has no C++ transceiver; use the files "
                "engine_configs/*/*_nixl.yaml on both sides"
            )
