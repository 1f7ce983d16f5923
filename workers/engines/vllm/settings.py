"""The engine arguments of one vLLM worker: what was given, what Baton needs, what cannot work."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.engines.vllm.schema import ArgsSchema
from workers.settings import Given, Loaded, SettingsError, build, has, put, read

log = logging.getLogger(__name__)

BATON = "baton"
TRANSFER = "kv_transfer_config"
LEASE = f"{TRANSFER}.kv_connector_extra_config"
LEASE_S = 120
"""A pin is released when its call is closed; the lease is for the case that nobody is left to do so."""

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_FLAGS = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
}
_NO_FLAG = {
    "kv_cache_config.free_gpu_memory_fraction": (
        "--free-gpu-memory-fraction is of the memory that the model leaves; vLLM's gpu_memory_utilization is "
        "of all: give that in the YAML"
    ),
    "moe_expert_parallel_size": (
        "--expert-parallel-size: vLLM shares experts among all GPUs or not at all: give "
        "enable_expert_parallel: true in the YAML"
    ),
}
_CHOSEN: dict[str, object] = {
    "worker_extension_cls": "workers.engines.vllm.inside.KvPins",
    "scheduling_policy": "priority",  # first come, first served among equals
    "generation_config": "vllm",  # the request says how to sample and where to stop
}


def load_vllm_settings(
    args: Any,
    mode: str,
    *,
    yaml_path: Path | None = None,
    override: str | None = None,
    typed: Mapping[str, object] | None = None,
) -> Loaded[dict[str, Any]]:
    """The keywords for `args` (`AsyncEngineArgs`) of a worker whose role is `mode`: prefill, decode or agg.

    Typed flag > override > YAML > Baton's choice > the build's default, leaf by leaf; only what was given or
    chosen is in `settings`. Raises SettingsError, also for what cannot work in `mode`.
    """
    schema = ArgsSchema(args, is_root=True)
    given = read(schema, yaml_path, _flags(typed or {}), override)
    for path, value in _CHOSEN.items():
        if path in given and path == "worker_extension_cls":
            raise SettingsError(f"{given[path][1]}: {path}: Baton needs it for itself; leave it out")
        if has(schema, path) and path not in given:
            put(given, path, value, BATON)
    if mode == "decode":
        _choose_no_prefix_cache(given)
    if mode != "agg":
        _choose_transfer(given, mode)
    elif any(path.startswith(TRANSFER) for path in given):
        log.warning("%s is given, but an aggregated worker hands nothing over", TRANSFER)
    return build(schema, given, str(yaml_path or "engine settings"))


def _flags(typed: Mapping[str, object]) -> dict[str, object]:
    for path in typed:
        if path in _NO_FLAG:
            raise SettingsError(_NO_FLAG[path])
    return {_FLAGS.get(path, path): value for path, value in typed.items()}


def _choose_no_prefix_cache(given: Given) -> None:
    """What a failed pull leaves in the blocks of a hybrid model, vLLM would keep under the prompt's name: the
    retry and whoever begins alike would be answered from it.
    """
    value, source = given.setdefault("enable_prefix_caching", (False, BATON))
    if value is not False:
        raise SettingsError(
            f"{source}: enable_prefix_caching: {value}: not on a decode worker, where KV that did not arrive "
            "would be found again; prefill has the cache"
        )


def _choose_transfer(given: Given, mode: str) -> None:
    if TRANSFER in given:
        value, source = given[TRANSFER]
        raise SettingsError(
            f"{source}: {TRANSFER}: {value}: a {mode} worker needs it; leave it out or fill it"
        )
    for name, value in (
        ("kv_connector", "NixlConnector"),
        ("kv_role", _ROLES[mode]),
        ("kv_load_failure_policy", "fail"),  # then another prefill worker is tried
        ("kv_connector_extra_config", {}),
    ):
        path = f"{TRANSFER}.{name}"
        if path not in given:
            put(given, path, value, BATON)
    connector, source = given[f"{TRANSFER}.kv_connector"]
    if connector != "NixlConnector":
        raise SettingsError(
            f"{source}: {TRANSFER}.kv_connector: {connector!r}: KV travels by NixlConnector only"
        )
    extra, source = given[LEASE]
    if not isinstance(extra, dict):
        raise SettingsError(f"{source}: {LEASE}: must be a mapping")
    if extra.get("bidirectional_kv_xfer"):
        raise SettingsError(f"{source}: {LEASE}.bidirectional_kv_xfer: KV goes from prefill to decode only")
    put(given, LEASE, {"kv_lease_duration": LEASE_S} | extra, source)
