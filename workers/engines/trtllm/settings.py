"""What LLM() is built with: flags, override, YAML, and the few values that Baton sets where nobody did."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.trtllm.schema import ModelSchema
from workers.flags import DisaggregationMode
from workers.settings import Given, Loaded, Schema, build, has, put, read
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
# What `auto` comes to for gpt-oss, made explicit so that the two sides of a pair can be compared.
RUNTIMES = {"UCX": "CPP", "MOONCAKE": "CPP", "MPI": "CPP", "NIXL": "PYTHON"}
BATON = "baton"  # the source of what Baton chose

# Keys of older YAMLs, and what they are called now. TensorRT-LLM refuses them without saying so.
RENAMED = {
    "kv_cache_free_gpu_memory_fraction": "it is kv_cache_config.free_gpu_memory_fraction now",
    "kv_cache_dtype": "it is kv_cache_config.dtype now",
    "moe_backend": "it is moe_config.backend now",
    "use_cuda_graph": "leave it out, or give cuda_graph_config: null for none",
    "cuda_graph_max_batch_size": "it is cuda_graph_config.max_batch_size now",
    "cuda_graph_padding_enabled": "it is cuda_graph_config.enable_padding now",
    "pytorch_backend_config": "its keys stand at the top now",
    "build_config": "its keys stand at the top now",
    "enable_mixed_sampler": "leave it out, the sampler mixes by itself now",
    "autotuner_enabled": "it is enable_autotuner now",
    "torch_compile_enabled": "it is torch_compile_config now",
}
# What a build may lack without harm, and why.
OPTIONAL = {
    RUNTIME: "this build has the C++ runtime only",
    MANAGER_V2: "this build has one KV cache manager only",
    "num_postprocess_workers": "nothing is detokenised in the worker",
    "enable_min_latency": "it concerns Llama 4 only",
}


def load_trtllm_settings(
    args: Any,
    mode: DisaggregationMode,
    *,
    yaml_path: Path | None = None,
    override: str | None = None,
    typed: Mapping[str, object] | None = None,
) -> Loaded[dict[str, Any]]:
    """The keywords for LLM(), for a build whose settings class is `args` (`TorchLlmArgs`).

    Typed flag > override > YAML > Baton's choice > the build's default, leaf by leaf; only what was given or
    chosen is in `settings`. Raises SettingsError, also for what cannot work in `mode`.
    """
    schema = ModelSchema(args, is_root=True)
    given = give_trtllm_settings(schema, mode, yaml_path=yaml_path, override=override, typed=typed)
    if mode != "agg" and _value(given, BUFFER) is None:
        log.warning("%s is not set: give it the longest prompt's tokens", BUFFER)
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
    """What was given, and what Baton chooses, before a build looks at it; without a schema, where none is
    installed, keys and types are not checked. Raises SettingsError for what no build can do in `mode`.
    """
    given = read(schema, yaml_path, typed or {}, override, renamed=RENAMED, optional=OPTIONAL)
    _drop_backend(given)
    _choose(schema, given, mode)
    if mode != "agg":
        _check_transfer(given)
    if mode == "prefill" and _value(given, OVERLAP_OFF) is False:
        raise SettingsError(
            f"{given[OVERLAP_OFF][1]}: {OVERLAP_OFF}: false: TensorRT-LLM does not support the overlap "
            "scheduler on prefill workers; leave it out"
        )
    return given


def _value(given: Given, path: str) -> object:
    return given.get(path, (None, ""))[0]


def _drop_backend(given: Given) -> None:
    """`backend: pytorch` stands in many YAMLs; it is the only one there is, and not for LLM()."""
    value, source = given.pop("backend", ("pytorch", ""))
    if value != "pytorch":
        raise SettingsError(f"{source}: backend: {value!r}: the engine runs with 'pytorch' only")


def _choose(schema: Schema | None, given: Given, mode: DisaggregationMode) -> None:
    """What Baton needs where the user has said nothing."""

    def choose(path: str, value: object) -> None:
        if path not in given and has(schema, path):
            put(given, path, value, BATON)

    choose("guided_decoding_backend", "xgrammar")
    if mode == "prefill":
        choose(OVERLAP_OFF, True)
    if not any(path.startswith(f"{TRANSCEIVER}.") for path in given):
        return
    if (backend := str(_value(given, BACKEND))) in RUNTIMES:
        choose(RUNTIME, RUNTIMES[backend])
        if _value(given, RUNTIME) in ("CPP", None):
            choose(MANAGER_V2, False)
    choose(TIMEOUT, KV_TIMEOUT_MS)


def _check_transfer(given: Given) -> None:
    backend, runtime = _value(given, BACKEND), _value(given, RUNTIME)
    if backend is None:
        raise SettingsError(
            f"{BACKEND} is not set: prefill and decode workers both need it, e.g. UCX, "
            "or run one with --disaggregation-mode agg"
        )
    for path, is_wrong, why in (
        (TIMEOUT, TIMEOUT in given and _value(given, TIMEOUT) is None,
         "null would wait for a dead worker for ever; give milliseconds"),
        (RUNTIME, runtime == "PYTHON" and backend not in ("NIXL", "DEFAULT"),
         "PYTHON moves KV over NIXL only; give backend: NIXL, or CPP"),
        (MANAGER_V2, runtime == "CPP" and _value(given, MANAGER_V2) is True,
         "true does not work with the C++ transceiver; leave it out, or give backend: NIXL"),
        (BEAM_WIDTH, _value(given, BEAM_WIDTH) not in (None, 1), "must be 1 to move KV"),
    ):  # fmt: skip
        if is_wrong:
            raise SettingsError(f"{given[path][1]}: {path}: {why}")
