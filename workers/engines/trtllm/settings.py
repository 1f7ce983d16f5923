"""What LLM() is built with: flags, override, YAML, and the few values that Baton sets where nobody did."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from workers.engines.trtllm.schema import ModelSchema
from workers.settings import Given, Loaded, Schema, SettingsError, build, has, put, read

log = logging.getLogger(__name__)

Mode = Literal["prefill", "decode", "agg"]

TRANSCEIVER = "cache_transceiver_config"
RUNTIME = f"{TRANSCEIVER}.transceiver_runtime"
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
    mode: Mode,
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
    given = read(schema, yaml_path, typed or {}, override, renamed=RENAMED, optional=OPTIONAL)
    _drop_backend(given)
    _choose(schema, given, mode)
    loaded: Loaded[dict[str, Any]] = build(schema, given, str(yaml_path or "engine settings"))
    if mode != "agg":
        _check_transfer(loaded)
    if mode == "prefill" and not loaded.values["disable_overlap_scheduler"]:
        log.warning("disable_overlap_scheduler is false: every published prefill set-up has it true")
    return loaded


def _drop_backend(given: Given) -> None:
    """`backend: pytorch` stands in many YAMLs; it is the only one there is, and not for LLM()."""
    value, source = given.pop("backend", ("pytorch", ""))
    if value != "pytorch":
        raise SettingsError(f"{source}: backend: {value!r}: the engine runs with 'pytorch' only")


def _choose(schema: Schema, given: Given, mode: Mode) -> None:
    """What Baton needs where the user has said nothing."""

    def choose(path: str, value: object) -> None:
        if path not in given and has(schema, path):
            put(given, path, value, BATON)

    choose("guided_decoding_backend", "xgrammar")
    if mode == "prefill":
        choose("disable_overlap_scheduler", True)
    if not any(path.startswith(f"{TRANSCEIVER}.") for path in given):
        return
    backend, _ = given.get(f"{TRANSCEIVER}.backend", (None, ""))
    if backend in RUNTIMES:
        choose(RUNTIME, RUNTIMES[str(backend)])
        if given.get(RUNTIME, ("CPP", ""))[0] in ("CPP", None):
            choose(MANAGER_V2, False)
    choose(f"{TRANSCEIVER}.kv_transfer_timeout_ms", KV_TIMEOUT_MS)


def _check_transfer(loaded: Loaded[dict[str, Any]]) -> None:
    values, sources = loaded.values, loaded.sources
    if values.get(f"{TRANSCEIVER}.backend") is None:
        raise SettingsError(
            f"{TRANSCEIVER}.backend is not set: prefill and decode workers both need it, e.g. UCX, "
            "or run one with --disaggregation-mode agg"
        )
    timeout = f"{TRANSCEIVER}.kv_transfer_timeout_ms"
    if values.get(timeout) is None and timeout in values:
        raise SettingsError(
            f"{sources[timeout]}: {timeout}: null would wait for a dead worker for ever; give milliseconds"
        )
    if values.get(RUNTIME) == "PYTHON" and values[f"{TRANSCEIVER}.backend"] not in ("NIXL", "DEFAULT"):
        raise SettingsError(
            f"{sources[RUNTIME]}: {RUNTIME}: PYTHON moves KV over NIXL only; give backend: NIXL, or CPP"
        )
    if values.get(RUNTIME) == "CPP" and values.get(MANAGER_V2) is True:
        raise SettingsError(
            f"{sources[MANAGER_V2]}: {MANAGER_V2}: true does not work with the C++ transceiver; "
            "leave it out, or give backend: NIXL"
        )
    if values["max_beam_width"] not in (None, 1):
        raise SettingsError(f"{sources['max_beam_width']}: max_beam_width: must be 1 to move KV")
    if values.get(f"{TRANSCEIVER}.max_tokens_in_buffer") is None:
        log.warning("%s.max_tokens_in_buffer is not set: give it the longest prompt's tokens", TRANSCEIVER)
