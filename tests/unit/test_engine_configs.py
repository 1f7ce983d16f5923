"""Every TensorRT-LLM engine config against TorchLlmArgs, its pair, the guides and the GPU's memory."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorrt_llm.llmapi import TorchLlmArgs

from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.settings import load_trtllm_settings

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "engine_configs"
FILES = sorted(path for path in CONFIGS.glob("gpt-oss-*/*.yaml"))
PAIRS = [path for path in FILES if path.stem.startswith("prefill")]
WIRES = {"_nixl": ("NIXL", "PYTHON", True)}
UCX = ("UCX", "CPP", False)  # the C++ transceiver needs the first KV cache manager
GIB = 1 << 30

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

    loaded = load_trtllm_settings(load_library().args, mode, yaml_path=path)

    of_the_file = {key: value for key, (value, source) in loaded.given.items() if str(path) in source}
    assert of_the_file == leaves(load(named(path)))
    assert caplog.records == []
    TorchLlmArgs(model="m", **loaded.settings)  # which refuses unknown keys, types and words


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_says_first_what_it_is_for_and_the_readme_names_it(path: Path) -> None:
    assert re.match(r"# .{30,}\.\n", path.read_text())
    assert f"`{path.relative_to(CONFIGS)}`" in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_readme_has_a_reason_for_every_key(path: Path) -> None:
    readme = (CONFIGS / "README.md").read_text()
    for key in leaves(load(named(path))):
        assert f"`{key.rpartition('.')[2]}`" in readme


@pytest.mark.parametrize("path", FILES, ids=named)
def test_cuda_graphs_reach_exactly_as_far_as_batches(path: Path) -> None:
    config = load(named(path))
    graphs = config["cuda_graph_config"]["max_batch_size"]
    assert graphs == config.get("max_batch_size", graphs)  # low latency: larger batches run, without graphs


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_prompt_is_never_too_long_for_one_step(path: Path) -> None:
    config = load(named(path))
    assert config.get("enable_chunked_prefill") or config["max_num_tokens"] >= 32768


@pytest.mark.parametrize("path", PAIRS, ids=named)
def test_prefill_and_decode_can_exchange_kv(path: Path) -> None:
    prefill, decode = load(named(path)), load(named(path).replace("prefill", "decode"))
    variant = path.stem.removeprefix("prefill")

    assert prefill["cache_transceiver_config"] == decode["cache_transceiver_config"]
    assert prefill["max_seq_len"] == decode["max_seq_len"]
    for key in ("dtype", "tokens_per_block", "enable_block_reuse", "use_kv_cache_manager_v2"):
        assert prefill["kv_cache_config"].get(key) == decode["kv_cache_config"].get(key)
    wire, cache = prefill["cache_transceiver_config"], prefill["kv_cache_config"]
    found = (wire["backend"], wire["transceiver_runtime"], cache["use_kv_cache_manager_v2"])
    assert found == WIRES.get(variant, UCX)
    assert cache["enable_block_reuse"] == (variant != "_guide")
    assert cache.get("dtype") == ("fp8" if variant == "_fp8" else None)
    assert wire["max_tokens_in_buffer"] >= prefill["max_seq_len"]
    assert wire["kv_transfer_timeout_ms"] == 60_000
    assert prefill["disable_overlap_scheduler"] is True
    assert decode.get("max_beam_width", 1) == prefill.get("max_beam_width", 1) == 1


def test_a_variant_differs_from_the_default_in_what_its_name_says() -> None:
    changed = {
        "_guide": {"moe_config.backend", "kv_cache_config.enable_block_reuse"},
        "_fp8": {"kv_cache_config.dtype"},
        "_nixl": {
            "kv_cache_config.use_kv_cache_manager_v2",
            "cache_transceiver_config.backend",
            "cache_transceiver_config.transceiver_runtime",
        },
    }
    variants = [path for path in FILES if path.stem.partition("_")[0] != "agg" and "_" in path.stem]
    assert {path.stem.removeprefix("prefill").removeprefix("decode") for path in variants} == set(changed)
    for path in variants:
        role, _, name = named(path).rpartition("_")
        default, variant = leaves(load(role)).items(), leaves(load(named(path))).items()
        assert {key for key, _ in default ^ variant} == changed[f"_{name}"]


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.startswith("agg")], ids=named)
def test_an_aggregated_worker_has_no_transceiver(path: Path) -> None:
    assert "cache_transceiver_config" not in load(named(path))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The memory of a checkpoint and its cache: layers * 2 (K and V) * KV heads * head size * 2 bytes per
    token.
    """

    num_layers: int
    weights_gib: float
    unshared_gib: float  # attention and embeddings, which attention DP keeps on every GPU

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * 2 * 8 * 64 * 2


BIG = Model(num_layers=36, weights_gib=63.5, unshared_gib=4.0)
SMALL = Model(num_layers=24, weights_gib=13.0, unshared_gib=2.5)
B200, H200, GB10, RTX = 178.0, 140.0, 119.7, 23.5  # GiB
ENGINE_GIB = 2.0  # activations, graphs and the CUDA context; the Spark's log has its own figure


def test_a_token_of_kv_has_the_size_that_the_log_of_the_spark_shows() -> None:
    assert (BIG.bytes_per_token, SMALL.bytes_per_token) == (73_728, 49_152)
    assert round(8224 * BIG.bytes_per_token / GIB, 2) == 0.56
    assert round(86720 * BIG.bytes_per_token / GIB, 2) == 5.95


@pytest.mark.parametrize(
    ("name", "model", "gpu_gib", "tp", "engine_gib"),
    [
        ("gpt-oss-120b/prefill", BIG, B200, 4, ENGINE_GIB),
        ("gpt-oss-120b/decode", BIG, B200, 4, ENGINE_GIB),
        ("gpt-oss-120b/agg_low_latency", BIG, B200, 1, ENGINE_GIB),
        ("gpt-oss-120b/agg_max_throughput_640", BIG, B200, 1, ENGINE_GIB),
        ("gpt-oss-120b/agg_h200_low_latency", BIG, H200, 1, ENGINE_GIB),
        ("gpt-oss-120b/agg_h200_max_throughput", BIG, H200, 1, ENGINE_GIB),
        ("gpt-oss-120b/agg_eval_dep_high", BIG, B200, 4, ENGINE_GIB),
        ("gpt-oss-120b/agg_eval_tp_high", BIG, B200, 4, ENGINE_GIB),
        (
            "gpt-oss-120b/agg_spark",
            BIG,
            GB10,
            1,
            49.3 + 0.85,
        ),  # the system and the CPU use 49.3 GiB
        ("gpt-oss-20b/agg", SMALL, RTX, 1, ENGINE_GIB),
        ("gpt-oss-20b/agg", SMALL, 19.5, 1, ENGINE_GIB),
        ("gpt-oss-20b/prefill", SMALL, RTX, 1, ENGINE_GIB),
        ("gpt-oss-20b/decode", SMALL, RTX, 1, ENGINE_GIB),
    ],
)
def test_the_longest_request_and_the_transfer_buffers_fit_the_gpu(
    name: str, model: Model, gpu_gib: float, tp: int, engine_gib: float
) -> None:
    """Per GPU: weights, a fraction of the free memory for KV, and in the rest the buffers, one each way."""
    config = load(name)
    whole = config.get("enable_attention_dp", False)
    weights_gib = model.weights_gib / tp + (model.unshared_gib if whole else 0)
    free_gib = gpu_gib - weights_gib - engine_gib
    fraction = config["kv_cache_config"]["free_gpu_memory_fraction"]
    per_token = model.bytes_per_token / (1 if whole else min(tp, 8))

    assert free_gib * fraction * GIB >= config.get("max_seq_len", 131_072) * per_token
    buffer_tokens = config.get("cache_transceiver_config", {}).get("max_tokens_in_buffer", 0)
    assert free_gib * (1 - fraction) * GIB >= 2 * buffer_tokens * per_token


# attention DP, MoE backend, CUDA graphs up to, max_batch_size, max_num_tokens, stream_interval, KV fraction;
# None: the guide leaves it to TensorRT-LLM. AUTO is ours: see README.md.
