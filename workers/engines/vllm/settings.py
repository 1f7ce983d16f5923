"""The engine arguments of a vLLM worker: the given values, and those that Baton requires or chooses."""

import os
from typing import Annotated, TypedDict

import msgspec

from workers.engines.library.settings import (
    BATON,
    SPECULATE,
    Guessing,
    Rules,
    check,
    choose,
    complete_speculation,
    demand,
    mapping_of,
    value_of,
)
from workers.engines.vllm.patches import CONNECTOR, turned_off
from workers.flags import DisaggregationMode
from workers.settings import AtLeastOne, Given, Share, put, refuse

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
TRANSFER = "kv_transfer_config"
LEASE = f"{TRANSFER}.kv_connector_extra_config"
LEASE_S = 120
"""Pins are released when their call is closed; the lease frees those whose release failed."""

GUESSING = Guessing(
    names=("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    lookup={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    methods=("eagle3",),
    method="method",
    models=("model",),
    num_tokens="num_speculative_tokens",
)
_NO_LOOKUP = (
    "vLLM's second model runner, which Baton uses, cannot guess tokens without a draft model; leave it out, "
    f"or set {SECOND_RUNNER}=0, with which sampled answers do not resume exactly"
)


class _Extra(TypedDict, total=False):
    """The connector's own settings that Baton depends on, in seconds."""

    kv_lease_duration: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


# Required values, and why.
_REQUIRED: dict[str, tuple[object, str]] = {
    "worker_extension_cls": ("workers.engines.vllm.inside.KvPins", "it releases the KV"),
    "structured_outputs_config.backend": ("xgrammar", "structural tags are in its format"),
    "structured_outputs_config.enable_in_reasoning": (True, "guided decoding starts at the first token"),
    "data_parallel_size": (1, "start one worker per replica"),
    "scheduling_policy": ("priority", "short turns overtake long prompts"),
}
_PEER_CONNECTOR: dict[str, tuple[object, str]] = {
    f"{TRANSFER}.kv_connector": ("PeerConnector", "KV moves over NVLink or NIXL"),
    f"{TRANSFER}.kv_connector_module_path": ("workers.engines.vllm.patches.connector", "it is Baton's"),
}
_NIXL: dict[str, tuple[object, str]] = {f"{TRANSFER}.kv_connector": ("NixlConnector", "KV moves over NIXL")}
NAMES = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
}


def _complete(given: Given, mode: DisaggregationMode) -> None:
    if value_of(given, "max_model_len") != -1:  # the longest that fits
        check(given, "max_model_len", AtLeastOne)
    choose(given, "generation_config", "vllm")  # the request says how to sample and where to stop
    for path, (value, why) in _REQUIRED.items():
        demand(given, path, value, why)
    if os.environ.get(SECOND_RUNNER) != "0":
        refuse(given, (SPECULATE,), _NO_LOOKUP)
    complete_speculation(given, mode, GUESSING)
    if mode == "agg":
        refuse(given, (TRANSFER,), "an aggregated worker does not transfer KV; leave it out")
        return
    connector = _NIXL if CONNECTOR in turned_off() else _PEER_CONNECTOR
    for path, (value, why) in connector.items():
        demand(given, path, value, why)
    demand(given, f"{TRANSFER}.kv_load_failure_policy", "fail", "so that another prefill worker is tried")
    role = "kv_producer" if mode == "prefill" else "kv_consumer"
    demand(given, f"{TRANSFER}.kv_role", role, f"it is a {mode} worker")
    check(given, LEASE, _Extra)
    _, source = given.get(LEASE, ({}, BATON))
    put(given, LEASE, {"kv_lease_duration": LEASE_S} | mapping_of(given, LEASE), source)


_COUNTS = (
    "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "block_size",
    "stream_interval",
)  # fmt: skip
VLLM_RULES = Rules(
    names=NAMES,
    kinds=dict.fromkeys(_COUNTS, AtLeastOne)  # clients may ask for 20 log probabilities
    | {"gpu_memory_utilization": Share, "max_logprobs": Annotated[int, msgspec.Meta(ge=20)]},
    complete=_complete,
)
