"""The engine arguments of a vLLM worker: the given values, and those that Baton requires or chooses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.handoff import NO_SPECULATION
from workers.engines.queue_size import WithQueueSize
from workers.engines.vllm.schema import ArgsSchema
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

BATON = "baton"
TRANSFER = "kv_transfer_config"
LEASE = f"{TRANSFER}.kv_connector_extra_config"
LEASE_S = 120
"""Pins are released when their call is closed; the lease frees those whose release failed."""

_SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
_EXTENSION = "workers.engines.vllm.inside.KvPins"
# Required values, and why.
_OWN: dict[str, tuple[object, str]] = {
    "worker_extension_cls": (_EXTENSION, "it releases the KV"),
    "structured_outputs_config.backend": ("xgrammar", "structural tags are in its format"),
    "structured_outputs_config.enable_in_reasoning": (True, "guided decoding starts at the first token"),
    "data_parallel_size": (1, "start one worker per replica"),
}
_OWN_OF_DISAGGREGATED: dict[str, tuple[object, str]] = {
    f"{TRANSFER}.kv_connector": ("PeerConnector", "KV moves over NVLink or NIXL"),
    f"{TRANSFER}.kv_connector_module_path": ("workers.engines.vllm.connector", "it is Baton's"),
    f"{TRANSFER}.kv_load_failure_policy": ("fail", "so that another prefill worker is tried"),
}
_OWN_OF_ROLE: dict[str, dict[str, tuple[object, str]]] = {
    "agg": {},
    "prefill": _OWN_OF_DISAGGREGATED | {f"{TRANSFER}.kv_role": ("kv_producer", "it is a prefill worker")},
    "decode": _OWN_OF_DISAGGREGATED | {f"{TRANSFER}.kv_role": ("kv_consumer", "it is a decode worker")},
}
NAMES = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
}
_COUNTS = (
    "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "block_size",
    "stream_interval",
)  # fmt: skip
_NO_FLAG = {
    "kv_cache_config.free_gpu_memory_fraction": (
        "--free-gpu-memory-fraction is a share of the memory that the model leaves free, vLLM's "
        "gpu_memory_utilization one of all memory: set that in the YAML"
    ),
    "moe_expert_parallel_size": (
        "--expert-parallel-size: vLLM distributes experts over all GPUs or none: set "
        "enable_expert_parallel: true in the YAML"
    ),
}
_CHOSEN: dict[str, object] = {
    "scheduling_policy": "priority",  # first come, first served among equals
    "generation_config": "vllm",  # the request says how to sample and where to stop
}


def load_vllm_settings(
    args: Any,
    mode: DisaggregationMode,
    *,
    yaml_path: Path | None = None,
    override: str | None = None,
    typed: Mapping[str, object] | None = None,
) -> Loaded[dict[str, Any]]:
    """The keywords for `args` (`AsyncEngineArgs`) of a worker in this mode.

    Per leaf: flag > override > YAML > Baton's choice > the build's default; `settings` has only given and
    chosen values. Raises SettingsError, also for what cannot work in `mode`.
    """
    schema = WithQueueSize(ArgsSchema(args, is_root=True))
    given = give_vllm_settings(schema, mode, yaml_path=yaml_path, override=override, typed=typed)
    return build(schema, given, str(yaml_path or "engine settings"))


def give_vllm_settings(
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
    given = read(schema, yaml_path, _flags(typed or {}), override)
    require_counts(given, _COUNTS)
    if given.get("max_model_len", (None, ""))[0] != -1:  # the longest that fits
        require_counts(given, ("max_model_len",))
    require_share(given, "gpu_memory_utilization")
    for path, value in _CHOSEN.items():
        if path not in given:
            put(given, path, value, BATON)
    _check_transfer(given, mode)
    for path, (value, why) in (_OWN | _OWN_OF_ROLE[mode]).items():
        _put_own(given, path, value, why)
    if mode != "agg":
        _put_lease(given)
    return given


def _flags(typed: Mapping[str, object]) -> dict[str, object]:
    for path in typed:
        if path in _NO_FLAG:
            raise SettingsError(_NO_FLAG[path])
    return {NAMES.get(path, path): value for path, value in typed.items()}


def _check_transfer(given: Given, mode: str) -> None:
    if mode == "agg":
        refuse(given, (TRANSFER,), "an aggregated worker does not transfer KV; leave it out")
        return
    refuse(given, _SPECULATION, NO_SPECULATION)
    if TRANSFER in given:
        value, source = given[TRANSFER]
        raise SettingsError(
            f"{source}: {TRANSFER}: {value}: a {mode} worker needs it; leave it out or set its keys"
        )


def _put_own(given: Given, path: str, value: object, why: str) -> None:
    if path not in given:
        put(given, path, value, BATON)
    elif given[path][0] != value:
        found, source = given[path]
        raise SettingsError(f"{source}: {path}: {found}: must be {value}: {why}")


def _put_lease(given: Given) -> None:
    extra, source = given.get(LEASE, ({}, BATON))
    if not isinstance(extra, dict):
        raise SettingsError(f"{source}: {LEASE}: must be a mapping")
    if extra.get("bidirectional_kv_xfer"):
        raise SettingsError(f"{source}: {LEASE}.bidirectional_kv_xfer: KV goes from prefill to decode only")
    lease_s = extra.get("kv_lease_duration", LEASE_S)
    if type(lease_s) not in {int, float} or not 0 < lease_s < float("inf"):
        raise SettingsError(
            f"{source}: {LEASE}.kv_lease_duration: {lease_s!r}: must be a positive number of seconds"
        )
    put(given, LEASE, extra | {"kv_lease_duration": lease_s}, source)
