"""The embedded engine's settings: the demo's files load, and errors say what is allowed."""

from pathlib import Path
from typing import Any

import pytest

from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.settings import load_settings

DEMO = Path(__file__).parents[2] / "engine_configs" / "demo"


@pytest.mark.parametrize("name", ["prefill", "decode", "agg"])
def test_the_demo_settings_load(name: str) -> None:
    settings = load_settings(EmbeddedSettings, DEMO / f"{name}.yaml", {}).settings
    assert settings.kv_cache_config.tokens_per_block == 16


@pytest.mark.parametrize(
    ("cls", "value", "message"),
    [
        (EmbeddedSettings, {"max_batch_size": 0}, "max_batch_size: 0 must be at least 1"),
        (EmbeddedSettings, {"max_num_tokens": 8}, "max_num_tokens: 8 .* max_batch_size"),
        (EmbeddedSettings, {"max_seq_len": 1}, "max_seq_len"),
        (EmbeddedSettings, {"max_queue_size": -1}, "max_queue_size"),
        (EmbeddedSettings, {"num_threads": 0}, "num_threads"),
        (EmbeddedSettings, {"tensor_parallel_size": 4}, "tensor_parallel_size: 4 .* one device"),
        (EmbeddedSettings, {"moe_expert_parallel_size": 2}, "moe_expert_parallel_size: 2 .* one device"),
        (KvCacheSettings, {"tokens_per_block": 0}, "tokens_per_block"),
        (KvCacheSettings, {"max_tokens": 31}, "max_tokens: 31 .* one block"),
        (KvCacheSettings, {"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction"),
        (KvCacheSettings, {"free_gpu_memory_fraction": 0}, "free_gpu_memory_fraction"),
        (CacheTransceiverSettings, {"kv_transfer_timeout_ms": 0}, "kv_transfer_timeout_ms"),
    ],
)
def test_an_impossible_value_is_named_with_its_rule(cls: Any, value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**value)


def test_the_edges_of_what_is_possible_are_possible() -> None:
    KvCacheSettings(free_gpu_memory_fraction=1)
    KvCacheSettings(tokens_per_block=1, max_tokens=1)
    CacheTransceiverSettings(kv_transfer_timeout_ms=1)
    EmbeddedSettings(max_batch_size=1, max_num_tokens=1, max_seq_len=2, max_queue_size=0)


def test_by_default_a_pin_lasts_a_minute_and_everything_is_bounded() -> None:
    assert CacheTransceiverSettings() == CacheTransceiverSettings(
        backend="DEFAULT", kv_transfer_timeout_ms=60_000
    )
    assert KvCacheSettings() == KvCacheSettings(
        tokens_per_block=32,
        max_tokens=None,
        free_gpu_memory_fraction=0.9,
        dtype="auto",
        enable_block_reuse=True,
    )
    assert EmbeddedSettings() == EmbeddedSettings(
        max_batch_size=32,
        max_num_tokens=512,
        max_seq_len=None,
        max_queue_size=256,
        enable_chunked_prefill=True,
        device="auto",
        dtype="auto",
        num_threads=1,
    )
