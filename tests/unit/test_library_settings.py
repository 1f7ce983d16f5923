"""Settings of TensorRT-LLM and vLLM: precedence, the installed build's classes, errors with their source."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm.llmapi import TorchLlmArgs
from vllm.engine.arg_utils import AsyncEngineArgs

from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.vllm.settings import LEASE, VLLM_RULES
from workers.flags import DisaggregationMode
from workers.settings import SettingsError

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + 17 * "aB"
SHIPPED = sorted(ROOT.glob("engine_configs/vllm/*/*.yaml"))
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
    with pytest.raises(SettingsError, match="disable_overlap_scheduler: false: TensorRT-LLM does not"):
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
    override = '{"cuda_graph_config": {"max_batch_size": 4}}'
    on = TRTLLM_RULES.load(TorchLlmArgs, "agg", yaml_path=path, override=override)
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
            "_fraction: 90.0: Expected `float` <= 1",
        ),
        ("cuda_graph_config:\n  batch_sizes: [1]\n  max_batch_size: 8\n" + UCX, "must equal max(batch"),
        (UCX + "  kv_transfer_timeout_ms: null", ": cache_transceiver_config.kv_transfer_timeout_ms"),
        ("speculative_config: {decoding_type: MTP}\n" + UCX, ": speculative_config: prefill and decode"),
        ("decoding_config: {decoding_type: Eagle3}\n" + UCX, ": decoding_config"),
    ],
)
def test_what_tensorrt_llm_cannot_do_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as refused:
        TRTLLM_RULES.load(TorchLlmArgs, "prefill", yaml_path=write(tmp_path, text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_access_token_is_not_printed(tmp_path: Path) -> None:
    loaded = VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=write(tmp_path, f"hf_token: {TOKEN}\n"))
    assert loaded.settings["hf_token"] == TOKEN
    assert TOKEN not in " ".join(loaded.lines())


def test_vllms_flag_beats_override_beats_yaml_beats_baton_leaf_by_leaf(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "max_num_seqs: 8\nmax_num_batched_tokens: 100\nblock_size: 64\n"
        "kv_transfer_config:\n  kv_buffer_device: cpu\n"
        "  kv_connector_extra_config: {kv_lease_duration: 7, num_threads: 2}\n",
    )
    override = {"max_num_seqs": 9, "max_num_batched_tokens": 101, "kv_transfer_config": {"kv_ip": "::1"}}
    loaded = VLLM_RULES.load(
        AsyncEngineArgs,
        "prefill",
        yaml_path=path,
        override=json.dumps(override),
        typed={"max_batch_size": 10, "model": "/m"},
    )
    transfer = loaded.settings["kv_transfer_config"]
    assert (transfer.kv_connector, transfer.kv_role) == ("PeerConnector", "kv_producer")
    assert (transfer.kv_buffer_device, transfer.kv_ip) == ("cpu", "::1")
    assert transfer.kv_connector_extra_config == {"kv_lease_duration": 7, "num_threads": 2}
    assert AsyncEngineArgs(**loaded.settings).block_size == 64
    lines = loaded.lines()
    for line in (
        "max_num_seqs=10 (flag)",
        "max_num_batched_tokens=101 (--override-engine-args)",
        f"block_size=64 ({path})",
        "kv_transfer_config.kv_load_failure_policy=fail (baton)",
        f"{LEASE}={{'kv_lease_duration': 7, 'num_threads': 2}} ({path})",
        "worker_extension_cls=workers.engines.vllm.inside.KvPins (baton)",
        "scheduling_policy=priority (baton)",
        "generation_config=vllm (baton)",
    ):
        assert line in lines


EXTRA = "kv_transfer_config: {kv_connector_extra_config: %s}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq: 8", "max_num_seq: unknown key; did you mean max_num_seqs?"),
        ("kv_transfer_config: {kv_conector: Nixl}", "did you mean kv_transfer_config.kv_connector?"),
        ("max_num_seqs: many", "max_num_seqs: 'many'"),
        ("dtype: int4", "dtype: 'int4': must be one of auto, half"),
        ("enforce_eager: 1", "enforce_eager: 1"),
        ("_api_process_count: 2", "_api_process_count: unknown key"),
        ("worker_extension_cls: mine.Own", "worker_extension_cls: mine.Own"),
        ("structured_outputs_config: {backend: guidance}", "structured_outputs_config.backend: guidance"),
        ("structured_outputs_config: {enable_in_reasoning: false}", "enable_in_reasoning: False"),
        ("data_parallel_size: 2", "data_parallel_size: 2: must be 1"),
        ("kv_transfer_config: {kv_connector: Mooncake}", "kv_connector: Mooncake"),
        ("kv_transfer_config: {kv_role: kv_both}", "kv_role: kv_both"),
        ("kv_transfer_config: {kv_load_failure_policy: recompute}", "kv_load_failure_policy: recompute"),
        ("max_model_len: -7", "max_model_len: -7"),
        ("max_logprobs: 5", "max_logprobs: 5: Expected `int` >= 20"),
        ("speculate: off", "speculate: must be lookup, or left out"),
        ("speculative_config: eagle3", "speculative_config: 'eagle3'"),
        ("speculative_config: {method: mtp}", "speculative_config: prefill and decode workers hand over"),
        ("spec_method: ngram", "spec_method"),
        (EXTRA % "7", "kv_connector_extra_config: 7: Expected `object | null`"),
        *(
            (EXTRA % f"{{kv_lease_duration: {value}}}", "kv_lease_duration")
            for value in ("null", "abc", "'120'", "0", "-1", ".inf", ".nan", "true")
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        VLLM_RULES.load(AsyncEngineArgs, "prefill", yaml_path=path)
    assert str(refused.value).startswith(f"{path}: ")
    assert says in str(refused.value)


def test_without_its_connector_kv_moves_over_nixls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_VLLM_WITHOUT", "connector")
    transfer = VLLM_RULES.load(AsyncEngineArgs, "decode").settings["kv_transfer_config"]
    assert (transfer.kv_connector, transfer.kv_connector_module_path) == ("NixlConnector", None)
    assert transfer.kv_role == "kv_consumer"


def test_an_aggregated_worker_takes_no_handoff(tmp_path: Path) -> None:
    given = write(tmp_path, "\nkv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}")
    with pytest.raises(SettingsError, match=r"engine.yaml: kv_transfer.*: an aggregated worker does not"):
        VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=given)
    VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=write(tmp_path, "kv_transfer_config: null"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_is_taken_as_it_stands(path: Path) -> None:
    mode: Any = path.stem.partition("_")[0]
    loaded = VLLM_RULES.load(AsyncEngineArgs, mode, yaml_path=path)
    assert AsyncEngineArgs(**loaded.settings).max_model_len == 131072
