"""The settings of our own engines: the demo's files load, and errors say what is allowed."""

import math
from typing import Any

import pytest

from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.mocker import MockerSettings
from workers.settings import SettingsError, load_settings


@pytest.mark.parametrize(
    ("cls", "key", "value", "rule"),
    [
        (EmbeddedSettings, "max_batch_size", 0, "`int` >= 1"),
        (EmbeddedSettings, "max_num_tokens", 8, "8 must be at least max_batch_size"),
        (EmbeddedSettings, "max_seq_len", 1, "`int` >= 2"),
        (EmbeddedSettings, "max_queue_size", -1, "`int` >= 0"),
        (EmbeddedSettings, "enable_chunked_prefill", False, "must be true"),
        (EmbeddedSettings, "tensor_parallel_size", 4, "`int` <= 1"),
        (EmbeddedSettings, "kv_cache_config.max_tokens", 0, "`int` >= 1"),
        (EmbeddedSettings, "kv_cache_config.free_gpu_memory_fraction", 1.5, "`float` <= 1"),
        (EmbeddedSettings, "kv_cache_config.free_gpu_memory_fraction", 0, "`float` > 0"),
        (EmbeddedSettings, "kv_cache_config.free_gpu_memory_fraction", math.nan, "`float` > 0"),
        (EmbeddedSettings, "cache_transceiver_config.kv_transfer_timeout_ms", 0, "`int` >= 1"),
        (MockerSettings, "decode_step_ms", math.nan, "`float` >= 0"),
        (MockerSettings, "kv_transfer_ms", math.inf, "`float` <= 1"),
        (MockerSettings, "prefill_tokens_per_s", 0.0, "`float` > 0"),
    ],
)
def test_an_impossible_value_is_named_with_its_rule(cls: Any, key: str, value: object, rule: str) -> None:
    with pytest.raises(SettingsError, match=f"^flag: {key}: .*{rule}"):
        load_settings(cls, None, {key: value})
