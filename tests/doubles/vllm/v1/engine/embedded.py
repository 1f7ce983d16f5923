"""Translates vLLM's settings and handoffs to the embedded engine's."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.messages import KvHandoff
from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.kv.transceiver import choose_transceiver

if TYPE_CHECKING:
    from workers.engines.embedded.engine import EmbeddedEngine

_FOREVER_S = 1_000_000
_OUR_KEY = "double_handoff"  # used by the embedded engine; the other keys are NIXL's


def nixl_params(config: Any, request_id: str, handoff: KvHandoff) -> dict[str, Any]:
    """The kv_transfer_params that prefill returns for decode."""
    num_tokens = handoff.num_prompt_tokens
    num_blocks = -(-num_tokens // config.cache_config.block_size)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": (list(range(1, 1 + num_blocks)),),
        "remote_engine_id": config.kv_transfer_config.engine_id,
        "remote_request_id": request_id,
        "remote_host": os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
        "remote_port": int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        "tp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        _OUR_KEY: msgspec.msgpack.encode(handoff),
    }


def opened(params: dict[str, Any]) -> KvHandoff:
    """The handoff in them."""
    handoff: KvHandoff = msgspec.msgpack.decode(params[_OUR_KEY], type=KvHandoff)
    return handoff


def lease_s(config: Any) -> float:
    """How long KV is kept for decode."""
    transfer = config.kv_transfer_config
    return float(transfer.kv_connector_extra_config.get("kv_lease_duration", 30)) if transfer else 0.0


def embedded_engine(config: Any) -> "EmbeddedEngine":
    """An engine whose handoffs do not expire."""
    from workers.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415  slow to load, and --check does not need it

    scheduler, cache = config.scheduler_config, config.cache_config
    settings = EmbeddedSettings(
        max_batch_size=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_seq_len=config.model_config.max_model_len,
        max_queue_size=100_000,
        kv_cache_config=KvCacheSettings(
            tokens_per_block=cache.block_size,
            max_tokens=cache.num_gpu_blocks * cache.block_size,
            enable_block_reuse=cache.enable_prefix_caching,
        ),
        cache_transceiver_config=CacheTransceiverSettings(kv_transfer_timeout_ms=_FOREVER_S * 1000),
    )
    return EmbeddedEngine(
        settings,
        model_path=Path(config.args.model),
        transceiver=choose_transceiver("TCP") if config.kv_transfer_config is not None else None,
    )
