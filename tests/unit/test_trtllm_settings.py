"""TensorRT-LLM's settings: precedence, the installed build's classes, errors with their source."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm.llmapi import TorchLlmArgs

from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.flags import DisaggregationMode
from workers.settings import SettingsError

UCX = "cache_transceiver_config:\n  backend: UCX\n  max_tokens_in_buffer: 1024\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_flag_beats_override_beats_yaml_beats_baton_beats_default_leaf_by_leaf(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "kv_cache_config:\n  free_gpu_memory_fraction: 0.8\n  dtype: fp8\n  tokens_per_block: 64\n"
        "max_batch_size: 8\nmax_num_tokens: 100\n" + UCX,
    )
    override = {"kv_cache_config": {"free_gpu_memory_fraction": 0.7, "dtype": "auto"}, "max_batch_size": 9}
    loaded = TRTLLM_RULES.load(
        TorchLlmArgs,
        "decode",
        yaml_path=path,
        override=json.dumps(override),
        typed={"kv_cache_config.free_gpu_memory_fraction": 0.6},
    )
    cache: Any = loaded.settings["kv_cache_config"]
    assert (cache.free_gpu_memory_fraction, cache.dtype, cache.tokens_per_block) == (0.6, "auto", 64)
    assert (loaded.settings["max_batch_size"], loaded.settings["max_num_tokens"]) == (9, 100)
    lines = loaded.lines()
    for line in (
        "kv_cache_config.free_gpu_memory_fraction=0.6 (flag)",
        "kv_cache_config.dtype=auto (--override-engine-args)",
        f"kv_cache_config.tokens_per_block=64 ({path})",
        "cache_transceiver_config.transceiver_runtime=CPP (baton)",
        "cache_transceiver_config.kv_transfer_timeout_ms=60000 (baton)",
        "guided_decoding_backend=xgrammar (baton)",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("given", "runtime", "manager_v2"),
    [
        ("backend: UCX", "CPP", False),
        ("backend: MPI", "CPP", False),
        ("backend: NIXL", "PYTHON", "auto"),
        ("{backend: NIXL, transceiver_runtime: CPP}", "CPP", False),
        ("backend: DEFAULT", "auto", "auto"),
        ("{backend: DEFAULT, transceiver_runtime: PYTHON}", "PYTHON", "auto"),
    ],
)
def test_the_wire_decides_its_runtime_and_the_kv_cache_manager(
    tmp_path: Path, given: str, runtime: str, manager_v2: object
) -> None:
    path = write(tmp_path, f"cache_transceiver_config: {given if '{' in given else '{' + given + '}'}\n")
    loaded = TRTLLM_RULES.load(TorchLlmArgs, "decode", yaml_path=path)
    assert loaded.values["cache_transceiver_config.transceiver_runtime"] == runtime
    assert loaded.values["kv_cache_config.use_kv_cache_manager_v2"] == manager_v2


def test_prefill_runs_without_the_overlap_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, UCX)
    chosen = TRTLLM_RULES.load(TorchLlmArgs, "prefill", yaml_path=path)
    assert "disable_overlap_scheduler=True (baton)" in chosen.lines()
    assert caplog.records == []
    assert not TRTLLM_RULES.load(TorchLlmArgs, "decode", yaml_path=path).values["disable_overlap_scheduler"]
    override = '{"disable_overlap_scheduler": false}'
    with pytest.raises(
        SettingsError, match="disable_overlap_scheduler: false: TensorRT-LLM does not support"
    ):
        TRTLLM_RULES.load(TorchLlmArgs, "prefill", yaml_path=path, override=override)
    decode = TRTLLM_RULES.load(TorchLlmArgs, "decode", yaml_path=path, override=override)
    assert decode.settings["disable_overlap_scheduler"] is False


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_each_half_of_a_pair_needs_a_wire(mode: DisaggregationMode) -> None:
    with pytest.raises(SettingsError, match=r"cache_transceiver_config\.backend is not set"):
        TRTLLM_RULES.load(TorchLlmArgs, mode)


def test_null_turns_a_mapping_off_and_a_later_leaf_turns_it_on_again(tmp_path: Path) -> None:
    path = write(tmp_path, "cuda_graph_config: null\n")
    off = TRTLLM_RULES.load(TorchLlmArgs, "agg", yaml_path=path)
    on = TRTLLM_RULES.load(
        TorchLlmArgs, "agg", yaml_path=path, override='{"cuda_graph_config": {"max_batch_size": 4}}'
    )
    assert off.settings["cuda_graph_config"] is None
    assert f"cuda_graph_config=None ({path})" in off.lines()
    assert on.settings["cuda_graph_config"].max_batch_size == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nkv_cache_config:\n  tokens_per_blok: 3", ": kv_cache_config.tokens_per_blok: unknown"),
        ("moe_backend: TRTLLM", ": moe_backend: unknown key"),
        ("cache_transceiver_config:\n  backend: FOO", ": cache_transceiver_config.backend: 'FOO'"),
        ("cuda_graph_config:\n  max_batch_size: -1\n" + UCX, ": cuda_graph_config.max_batch_size: -1"),
        ("max_batch_size: many", ": max_batch_size: 'many': Expected `int | null`, got `str`"),
        ("backend: tensorrt", ": backend: 'tensorrt'"),
        (UCX + "max_beam_width: 2", ": max_beam_width: must be 1"),
        (UCX + "kv_cache_config:\n  use_kv_cache_manager_v2: true", ": kv_cache_config.use_kv_cache_mana"),
        (UCX + "  transceiver_runtime: PYTHON", ": cache_transceiver_config.transceiver_runtime: PYTHON"),
        ("kv_cache_config:\n  free_gpu_memory_fraction: null\n" + UCX, "kv_cache_config: '<='"),
        (
            "kv_cache_config:\n  free_gpu_memory_fraction: 90\n" + UCX,
            ": kv_cache_config.free_gpu_memory_fraction: 90.0: Expected `float` <= 1.0",
        ),
        ("cuda_graph_config:\n  batch_sizes: [1]\n  max_batch_size: 8\n" + UCX, "must equal max(batch"),
        (UCX + "  kv_transfer_timeout_ms: null", ": cache_transceiver_config.kv_transfer_timeout_ms"),
        ("speculative_config: {decoding_type: MTP}\n" + UCX, ": speculative_config: prefill and decode"),
        ("decoding_config: {decoding_type: Eagle3}\n" + UCX, ": decoding_config"),
    ],
)
def test_what_cannot_work_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        TRTLLM_RULES.load(TorchLlmArgs, "prefill", yaml_path=write(tmp_path, text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
