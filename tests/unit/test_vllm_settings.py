"""vLLM's settings: precedence, the installed build's classes, errors with their source."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from workers.engines.vllm.settings import LEASE, VLLM_RULES
from workers.settings import SettingsError

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + 17 * "aB"
SHIPPED = sorted(ROOT.glob("engine_configs/vllm/*/*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_an_access_token_is_not_printed(tmp_path: Path) -> None:
    loaded = VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=write(tmp_path, f"hf_token: {TOKEN}\n"))
    assert loaded.settings["hf_token"] == TOKEN
    assert TOKEN not in " ".join(loaded.lines())


def test_flag_beats_override_beats_yaml_beats_baton_beats_default_leaf_by_leaf(tmp_path: Path) -> None:
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
        ("speculative_config: {method: mtp}", "speculative_config: prefill and decode workers hand over"),
        ("spec_method: ngram", "spec_method"),
        ("spec_tokens: 3", "spec_tokens"),
        (EXTRA % "7", "kv_connector_extra_config: 7: Expected `object | null`"),
        *(
            (EXTRA % f"{{kv_lease_duration: {value}}}", "kv_lease_duration")
            for value in ("null", "abc", "'120'", "0", "-1", ".inf", ".nan", "true")
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(tmp_path: Path, text: str, says: str) -> None:
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
    with pytest.raises(
        SettingsError, match=r"engine.yaml: kv_transfer.*: an aggregated worker does not transfer KV"
    ):
        VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=given)
    VLLM_RULES.load(AsyncEngineArgs, "agg", yaml_path=write(tmp_path, "kv_transfer_config: null"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_is_taken_as_it_stands(path: Path) -> None:
    mode: Any = path.stem.partition("_")[0]
    loaded = VLLM_RULES.load(AsyncEngineArgs, mode, yaml_path=path)
    assert AsyncEngineArgs(**loaded.settings).max_model_len == 131072
