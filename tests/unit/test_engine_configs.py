"""Every TensorRT-LLM engine config against TorchLlmArgs, its pair, the file that it varies and the README."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorrt_llm.llmapi import TorchLlmArgs

from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.settings import TRTLLM_RULES

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "engine_configs"
FILES = sorted(path for path in CONFIGS.glob("gpt-oss-*/*.yaml"))
Config = dict[str, Any]


def load(name: str) -> Config:
    config: Config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return config


def leaves(config: Config) -> Config:
    """Values by key path."""
    found: Config = {}
    for key, value in config.items():
        found |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return found


def named(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_worker_takes_it_as_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mode: Any = path.stem.partition("_")[0]

    loaded = TRTLLM_RULES.load(load_library().args, mode, yaml_path=path)

    of_the_file = {key: value for key, (value, source) in loaded.given.items() if str(path) in source}
    assert leaves(of_the_file) == leaves(load(named(path)))
    assert caplog.records == []
    TorchLlmArgs(model="m", **loaded.settings)  # which refuses unknown keys, types and words


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_says_first_what_it_is_for_and_the_readme_has_it_and_its_keys(path: Path) -> None:
    assert re.match(r"# .{30,}\.\n", path.read_text())
    readme = (CONFIGS / "README.md").read_text()
    for name in (str(path.relative_to(CONFIGS)), *leaves(load(named(path)))):
        assert f"`{name if '/' in name else name.rpartition('.')[2]}`" in readme


# Dynamo's guide for gpt-oss-120b, "Understanding the Configuration"; 1.3 wants its `ucx` in upper case.
BOTH = {"moe_config.backend": "CUTLASS", "cache_transceiver_config.backend": "UCX", "tensor_parallel_size": 4,
        "moe_expert_parallel_size": 4}  # fmt: skip
GUIDE: dict[str, Config] = {
    "prefill": {"enable_attention_dp": False, "enable_chunked_prefill": True, "max_num_tokens": 20_000,
                "cuda_graph_config.max_batch_size": 32, "max_batch_size": 32,
                "kv_cache_config.free_gpu_memory_fraction": 0.9},
    "decode": {"enable_attention_dp": True, "disable_overlap_scheduler": False, "max_num_tokens": 16_384,
               "cuda_graph_config.max_batch_size": 128, "max_batch_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("role", GUIDE)
def test_the_guides_pair_has_the_guides_values(role: str) -> None:
    found = leaves(load(f"gpt-oss-120b/{role}_guide"))
    wanted = GUIDE[role] | BOTH
    assert {key: found[key] for key in wanted} == wanted


VARIANTS: dict[str, Config] = {
    "guide": {"moe_config.backend": "CUTLASS", "kv_cache_config.enable_block_reuse": False},
    "fp8": {"kv_cache_config.dtype": "fp8"},
    "nixl": {"kv_cache_config.use_kv_cache_manager_v2": True, "cache_transceiver_config.backend": "NIXL",
             "cache_transceiver_config.transceiver_runtime": "PYTHON"},
    "eagle3": {"kv_cache_config.enable_block_reuse": False, "speculative_config.decoding_type": "Eagle3",
               "speculative_config.speculative_model": "nvidia/gpt-oss-120b-Eagle3-v3",
               "speculative_config.max_draft_len": 3},
}  # fmt: skip


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.stem.rpartition("_")[0] in {"prefill", "decode"}], ids=named
)
def test_a_variant_is_the_default_but_for_what_its_name_says(path: Path) -> None:
    default, _, variant = named(path).rpartition("_")
    assert leaves(load(named(path))) == leaves(load(default)) | VARIANTS[variant]


@pytest.mark.parametrize("prefill", sorted(CONFIGS.glob("**/prefill*.yaml")), ids=named)
def test_the_files_of_a_pair_agree_on_what_the_kv_is(prefill: Path) -> None:
    both = [leaves(load(named(path))) for path in (prefill, prefill.with_name(f"decode{prefill.name[7:]}"))]
    shared = ("dtype", "tokens_per_block", "block_size", "backend", "transceiver_runtime", "model",
              "use_kv_cache_manager_v2", "speculative_model", "max_draft_len", "max_seq_len")  # fmt: skip
    found = [{key: value for key, value in each.items() if key.rpartition(".")[2] in shared} for each in both]
    assert found[0] == found[1]
