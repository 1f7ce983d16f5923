"""The settings of our own engines: the demo's files load, and errors say what is allowed."""

import math
from pathlib import Path
from typing import Any

import pytest

from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.engines.mocker import MockerSettings
from workers.settings import InvalidField, load_settings

DEMO = Path(__file__).parents[2] / "engine_configs" / "demo"


@pytest.mark.parametrize("name", ["prefill", "decode", "agg"])
def test_the_demo_settings_load(name: str) -> None:
    settings = load_settings(EmbeddedSettings, DEMO / f"{name}.yaml", {}).settings
    assert settings.kv_cache_config.tokens_per_block == 16


@pytest.mark.parametrize(
    ("cls", "value", "rule"),
    [
        (EmbeddedSettings, {"max_batch_size": 0}, "0 must be at least 1"),
        (EmbeddedSettings, {"max_num_tokens": 8}, "8 must be at least max_batch_size"),
        (EmbeddedSettings, {"max_seq_len": 1}, "1 must be at least 2"),
        (EmbeddedSettings, {"max_queue_size": -1}, "-1 must be 0 or more"),
        (EmbeddedSettings, {"num_threads": 0}, "0 must be at least 1"),
        (EmbeddedSettings, {"enable_chunked_prefill": False}, "must be true"),
        (EmbeddedSettings, {"tensor_parallel_size": 4}, "4 must be 1: .* one device"),
        (EmbeddedSettings, {"moe_expert_parallel_size": 2}, "2 must be 1: .* one device"),
        (KvCacheSettings, {"tokens_per_block": 0}, "0 must be at least 1"),
        (KvCacheSettings, {"max_tokens": 31}, "31 must be at least one block"),
        (KvCacheSettings, {"free_gpu_memory_fraction": 1.5}, "1.5 must be above 0 and at most 1"),
        (KvCacheSettings, {"free_gpu_memory_fraction": 0}, "0 must be above 0"),
        (KvCacheSettings, {"free_gpu_memory_fraction": math.nan}, "nan must be above 0"),
        (CacheTransceiverSettings, {"kv_transfer_timeout_ms": 0}, "0 must be above 0"),
        (MockerSettings, {"max_batch_size": -1}, "-1 must be at least 1"),
        (MockerSettings, {"max_queue_size": -1}, "-1 must be 0 or more"),
        (MockerSettings, {"max_seq_len": 1}, "1 must be at least 2"),
        (MockerSettings, {"decode_step_ms": math.nan}, "nan must be a finite number, 0 or more"),
        (MockerSettings, {"kv_transfer_ms": math.inf}, "inf must be a finite number, 0 or more"),
        (MockerSettings, {"prefill_tokens_per_s": 0.0}, "0.0 must be a finite number above 0"),
        (MockerSettings, {"handoff_ttl_s": math.nan}, "nan must be a finite number above 0"),
    ],
)
def test_an_impossible_value_is_named_with_its_rule(cls: Any, value: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidField, match=rule) as refused:
        cls(**value)
    assert [refused.value.name] == list(value)


def test_the_edges_of_what_is_possible_are_possible() -> None:
    KvCacheSettings(free_gpu_memory_fraction=1)
    KvCacheSettings(tokens_per_block=1, max_tokens=1)
    CacheTransceiverSettings(kv_transfer_timeout_ms=1)
    EmbeddedSettings(max_batch_size=1, max_num_tokens=1, max_seq_len=2, max_queue_size=0)
