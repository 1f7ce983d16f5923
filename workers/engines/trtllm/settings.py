"""The keywords for LLM(): flags, override, YAML, and the few values that Baton sets by default."""

from workers.engines.library.settings import Guessing, Rules, choose, complete_speculation, value_of
from workers.flags import DisaggregationMode
from workers.settings import AtLeastOne, Given, SettingsError, Share

TRANSCEIVER = "cache_transceiver_config"
BACKEND = f"{TRANSCEIVER}.backend"
RUNTIME = f"{TRANSCEIVER}.transceiver_runtime"
TIMEOUT = f"{TRANSCEIVER}.kv_transfer_timeout_ms"
BUFFER = f"{TRANSCEIVER}.max_tokens_in_buffer"
BEAM_WIDTH = "max_beam_width"
OVERLAP_OFF = "disable_overlap_scheduler"
MANAGER_V2 = "kv_cache_config.use_kv_cache_manager_v2"
KV_TIMEOUT_MS = 60_000
GUESSING = Guessing(
    names=("speculative_config", "decoding_config"),
    # A suffix automaton over prompt and answer, on the GPU; off while more than 16 requests run.
    lookup={"decoding_type": "SA", "max_draft_len": 4, "max_concurrency": 16},
    methods=("Eagle3", "Eagle"),  # one and the same for its PyTorch backend
    method="decoding_type",
    models=("speculative_model", "speculative_model_dir"),
    num_tokens="max_draft_len",
)
# What `auto` resolves to for gpt-oss; explicit, so that the two sides of a pair can be compared.
RUNTIMES = {"UCX": "CPP", "MOONCAKE": "CPP", "MPI": "CPP", "NIXL": "PYTHON"}
# The KV cache manager that gpt-oss runs with, by `use_kv_cache_manager_v2`, and by runtime if that is `auto`.
MANAGERS = {False: "v1", True: "v2", "CPP": "v1", "PYTHON": "v2"}


def _complete(given: Given, mode: DisaggregationMode) -> None:
    # Many YAMLs have the only backend, which LLM() does not take.
    value, source = given.pop("backend", ("pytorch", ""))
    if value != "pytorch":
        raise SettingsError(f"{source}: backend: {value!r}: the engine runs with 'pytorch' only")
    choose(given, "guided_decoding_backend", "xgrammar")
    if mode == "prefill":
        choose(given, OVERLAP_OFF, True)
    if any(path.startswith(f"{TRANSCEIVER}.") for path in given):
        if (backend := str(value_of(given, BACKEND))) in RUNTIMES:
            choose(given, RUNTIME, RUNTIMES[backend])
            if value_of(given, RUNTIME) == "CPP":
                choose(given, MANAGER_V2, False)
        choose(given, TIMEOUT, KV_TIMEOUT_MS)
    complete_speculation(given, mode, GUESSING)
    if mode != "agg":
        _check_transfer(given, mode)


def _check_transfer(given: Given, mode: DisaggregationMode) -> None:
    backend, runtime = value_of(given, BACKEND), value_of(given, RUNTIME)
    if backend is None:
        raise SettingsError(
            f"{BACKEND} is not set: prefill and decode workers both need it, e.g. UCX, "
            "or run the worker with --disaggregation-mode agg"
        )
    for path, is_wrong, why in (
        (TIMEOUT, TIMEOUT in given and value_of(given, TIMEOUT) is None,
         "null would wait forever for a dead worker; set milliseconds"),
        (RUNTIME, runtime == "PYTHON" and backend not in ("NIXL", "DEFAULT"),
         "PYTHON moves KV over NIXL only; set backend: NIXL, or CPP"),
        (MANAGER_V2, runtime == "CPP" and value_of(given, MANAGER_V2) is True,
         "true does not work with the C++ transceiver; leave it out, or set backend: NIXL"),
        (BEAM_WIDTH, value_of(given, BEAM_WIDTH) not in (None, 1), "must be 1 for KV transfers"),
        (OVERLAP_OFF, mode == "prefill" and value_of(given, OVERLAP_OFF) is False,
         "false: TensorRT-LLM does not support the overlap scheduler on prefill workers; leave it out"),
    ):  # fmt: skip
        if is_wrong:
            raise SettingsError(f"{given[path][1]}: {path}: {why}")


_COUNTS = (
    "max_batch_size", "max_num_tokens", "max_seq_len", "max_input_len", "max_beam_width",
    "stream_interval", "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size",
    "kv_cache_config.tokens_per_block", "kv_cache_config.max_tokens", BUFFER, TIMEOUT,
)  # fmt: skip
TRTLLM_RULES = Rules(
    kinds=dict.fromkeys(_COUNTS, AtLeastOne) | {"kv_cache_config.free_gpu_memory_fraction": Share},
    complete=_complete,
)
