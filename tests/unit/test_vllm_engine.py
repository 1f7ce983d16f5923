"""The vllm engine over vLLM's double: what it announces, expects in the cache and counts."""

import dataclasses
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from baton.messages import KvLayout
from tests.engine_calls import ask, tokens
from tests.tiny_gpt_oss import CONTEXT_LENGTH
from tests.vllm_engine import CONFIG, new_engine, started
from workers.engine import EngineInfo
from workers.engines.vllm.adapter import VllmAdapter
from workers.engines.vllm.patches import WITHOUT
from workers.engines.vllm.settings import SECOND_RUNNER
from workers.flags import DisaggregationMode
from workers.settings import SettingsError


async def info_of(checkpoint: Path, mode: DisaggregationMode, **config: Any) -> EngineInfo:
    engine = new_engine(checkpoint, mode, **config)
    try:
        return await engine.start()
    finally:
        await engine.stop()


async def test_the_worker_announces_what_it_serves(checkpoint: Path) -> None:
    info = await info_of(checkpoint, "decode", max_queue_size=9)
    assert (info.engine, info.context_length) == ("vllm", CONTEXT_LENGTH)
    assert (info.max_batch_size, info.max_queue_size) == (CONFIG["max_num_seqs"], 9)
    assert info.kv_transfer == f"nixl:{quote(str(checkpoint))}"
    assert info.kv_layout == KvLayout(
        dtype="float32", tokens_per_block=8, num_layers=4, num_kv_heads=2, head_dim=16, tensor_parallel_size=1
    )
    # Its steps could be longer than its context, which its warm-up must not be.
    other = await info_of(checkpoint, "agg", kv_cache_dtype="fp8", tensor_parallel_size=2, max_model_len=20)
    assert (other.kv_transfer, other.context_length, other.max_queue_size) == ("", 20, 256)
    assert other.kv_layout is not None
    assert (other.kv_layout.dtype, other.kv_layout.tensor_parallel_size) == ("fp8", 2)


HEAD: dict[str, Any] = {"method": "eagle3", "model": "a", "num_speculative_tokens": 3}


async def test_the_worker_announces_its_head_which_both_sides_need(checkpoint: Path) -> None:
    prefill = await info_of(checkpoint, "prefill", speculative_config=HEAD)
    assert prefill.kv_layout is not None
    assert prefill.kv_layout.draft == "eagle3 a 3"
    decode = await info_of(checkpoint, "decode")
    assert decode.kv_layout == msgspec.structs.replace(prefill.kv_layout, draft="none")


def test_a_head_that_is_not_here_is_named_before_anything_loads(checkpoint: Path) -> None:
    with pytest.raises(SettingsError, match=r"speculative_config\.model: owner/absent is neither a folder"):
        new_engine(checkpoint, "prefill", speculative_config=HEAD | {"model": "owner/absent"})


def test_a_release_without_a_trial_of_it_hands_no_heads_kv_over(checkpoint: Path) -> None:
    adapter: Any = new_engine(checkpoint, "decode", speculative_config=HEAD).adapter
    older = dataclasses.replace(adapter.lib, version="0.25.1")
    with pytest.raises(SettingsError, match=r"vLLM 0.25.1: speculative_config: .* with vLLM 0.26 only"):
        VllmAdapter(adapter.loaded, older, adapter.model)
    alone: Any = new_engine(checkpoint, "agg", speculative_config=HEAD).adapter
    VllmAdapter(alone.loaded, older, alone.model)


@pytest.mark.parametrize(("without", "is_positional"), [("", True), ("draws", False)])
async def test_draws_that_depend_on_guesses_do_not_resume(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, without: str, is_positional: bool
) -> None:
    monkeypatch.setenv(SECOND_RUNNER, "1")
    monkeypatch.setenv(WITHOUT, without)
    async with started(checkpoint, "agg", speculative_config=HEAD) as engine:
        assert engine.adapter.is_positional == is_positional  # type: ignore[attr-defined]  # vLLM's


@pytest.mark.parametrize(
    ("config", "num_lacking"),
    [
        ({}, 200 - 192),
        ({"num_gpu_blocks_override": 32}, 200 - 128),  # half of the cache: two blocks of the estimate
        ({"enable_prefix_caching": False}, 200),
    ],
    ids=str,
)
async def test_what_was_answered_is_expected_in_the_cache_as_far_as_there_is_room(
    checkpoint: Path, config: dict[str, Any], num_lacking: int
) -> None:
    async with started(checkpoint, "decode", **config) as engine:
        await tokens(engine.decode(ask(200, max_tokens=2)))
        assert engine.num_lacking_tokens(ask(200)) == num_lacking
