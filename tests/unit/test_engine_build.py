"""Building an engine: which one, from which settings, and what is refused."""

import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from baton.flags import read
from tests.certificates import Authority
from workers.engines.build import build_engine, given_settings, with_engine
from workers.engines.library.product_check import Shape, incomplete, multiply, verdict
from workers.engines.trtllm.library import load_library as load_trtllm
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.vllm.library import load_library as load_vllm
from workers.engines.vllm.settings import VLLM_RULES
from workers.flags import WorkerSettings
from workers.settings import Given, Loaded, SettingsError


def built(*arguments: str) -> tuple[Any, list[str]]:
    """An engine for the demo model, and the lines of its settings."""
    line = ["--model-path", "models/demo", *arguments]
    return build_engine(read(WorkerSettings, line))


def effective(*arguments: str) -> list[str]:
    """The lines of the engine's settings."""
    return built(*arguments)[1]


def test_a_wire_that_cannot_be_had_is_refused_with_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Authority(tmp_path / "authority").environ("worker").items():
        monkeypatch.setenv(name, value)
    line = ["--engine", "embedded", "--disaggregation-mode", "decode"]
    with pytest.raises(SettingsError, match=r"UCX is unavailable: .*; use DEFAULT or TCP"):
        built(*line, "--override-engine-args", '{"cache_transceiver_config": {"backend": "UCX"}}')


def test_vllm_moves_kv_from_the_workers_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "")
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST")
    effective("--engine", "vllm", "--host", "127.0.0.2")
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.2"


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "embedded", "mocker"])
def test_a_folder_without_a_model_or_with_a_broken_one_is_refused(tmp_path: Path, engine: str) -> None:
    line = ["--engine", engine, "--model-path", str(tmp_path)]
    with pytest.raises(SettingsError, match=r"no config\.json in this folder"):
        built(*line)
    if engine != "mocker":
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(SettingsError, match=r"--model-path .*config\.json: Object missing"):
            built(*line)


@pytest.mark.parametrize("engine", ["embedded", "mocker", "trtllm", "vllm"])
def test_settings_are_checked_as_a_worker_does_before_its_engine_is_loaded(engine: str) -> None:
    def given(*arguments: str) -> Given:
        line = ["--model-path", "models/demo", "--engine", engine, *arguments]
        return given_settings(read(WorkerSettings, line))

    own_names = "max_batch_size", "max_seq_len"
    name, length = ("max_num_seqs", "max_model_len") if engine == "vllm" else own_names
    line = ["--max-batch-size", "3", "--override-engine-args", f'{{"{length}": 77}}']
    found, lines = given(*line), effective("--engine", engine, *line)
    assert (found[name], found[length]) == ((3, "flag"), (77, "--override-engine-args"))
    assert {f"{name}=3 (flag)", f"{length}=77 (--override-engine-args)"} <= set(lines)
    if engine in ("embedded", "mocker"):
        wrong = '{"max_cached_tokens": -1}' if engine == "mocker" else '{"max_batch_size": 0}'
        with pytest.raises(SettingsError):
            given("--override-engine-args", wrong)


def test_vllm_gets_a_model_folder_that_holds_in_every_working_directory() -> None:
    lines = effective("--engine", "vllm", "--disaggregation-mode", "agg")
    assert f"model={Path('models/demo').absolute()} " in "".join(lines)


@pytest.mark.parametrize(("mode", "is_told"), [("prefill", True), ("agg", False)])
def test_an_engine_that_moves_kv_without_tls_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    is_told: bool,
) -> None:
    for name, value in Authority(tmp_path / "authority").environ("worker").items():
        monkeypatch.setenv(name, value)
    line = ["--engine", "trtllm", "--model-path", "models/demo", "--disaggregation-mode", mode]
    line += ["--override-engine-args", '{"cache_transceiver_config": {"backend": "UCX"}}']
    build_engine(read(WorkerSettings, line))
    assert ("trtllm moves KV itself, without the TLS of BATON_PEER_CERT" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("share", "has_mps", "named"),
    [
        ("60", False, "60"),
        ("60", True, "60"),
        ("", True, r"\(the server's\)"),
        ("", False, None),
        ("100", True, None),
    ],
)
def test_a_share_of_the_sms_with_incomplete_products_is_refused(
    share: str, has_mps: bool, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "on 78 SMs $2 $3" >&2\nexit $STATUS\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", share)
    if has_mps:
        (tmp_path / "control").touch()
    monkeypatch.setenv("STATUS", "0")
    built("--engine", "vllm")
    monkeypatch.setenv("STATUS", "1")
    built("--engine", "vllm", "--check")
    if named is None:
        built("--engine", "vllm")
        return
    found = f"THREAD_PERCENTAGE={named}: on 78 SMs workers.engines.library.product_check models/demo$"
    with pytest.raises(SettingsError, match=found):
        built("--engine", "vllm")


def test_products_that_are_not_whole_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwritten(bias: Tensor | None, rows: Tensor, weight: Tensor, out: Tensor) -> None:
        multiply(bias, rows, weight, out)
        if len(rows) == 24 and len(weight) == 96 and bias is not None:
            out[:, 90:] = math.nan

    shape = Shape(
        96, hidden_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=64, num_local_experts=4
    )
    assert not list(incomplete(shape, "cpu"))
    assert list(incomplete(shape, "cpu", unwritten)) == ["lm_head, 24 tokens, with a bias"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert (verdict(Path("models/demo")) or "").startswith("PyTorch finds no GPU")


def chosen(line: str, installed: set[str]) -> str | None:
    parsed = read(WorkerSettings, shlex.split(line))
    complete = with_engine(parsed, installed.__contains__)
    assert complete.sources["engine"] == ("chosen" if parsed.settings.engine is None else "flag")
    return complete.settings.engine


@pytest.mark.parametrize(
    ("line", "installed", "engine"),
    [
        ("--max-batch-size 4", {"tensorrt_llm", "transformers"}, "trtllm"),
        ("", {"vllm", "transformers"}, "vllm"),
        ("--extra-engine-args no/such.yaml", {"transformers"}, "embedded"),
        ("--engine mocker", set(), "mocker"),
    ],
)
def test_the_given_engine_is_taken_or_else_the_installed_one(
    line: str, installed: set[str], engine: str
) -> None:
    assert chosen(line, installed) == engine


@pytest.mark.parametrize(
    ("installed", "says"),
    [(set(), "no engine is installed"), ({"tensorrt_llm", "vllm"}, "set --engine trtllm or --engine vllm")],
)
def test_without_a_choice_the_error_names_what_to_do(installed: set[str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        chosen("", installed)


Load = Callable[..., Loaded[dict[str, Any]]]
LIBRARIES: dict[str, Load] = {
    "trtllm": lambda **given: TRTLLM_RULES.load(load_trtllm().args, "agg", **given),
    "vllm": lambda **given: VLLM_RULES.load(load_vllm().engine_args, "agg", **given),
}


@pytest.mark.parametrize("load", LIBRARIES.values(), ids=LIBRARIES)
def test_a_library_does_not_get_the_queues_size(load: Load, tmp_path: Path) -> None:
    yaml = tmp_path / "engine.yaml"
    yaml.write_text("max_queue_size: 4096\n")

    loaded = load(yaml_path=yaml)
    assert loaded.values["max_queue_size"] == 4096
    assert f"max_queue_size=4096 ({yaml})" in loaded.lines()
    assert "max_queue_size" not in loaded.settings
    assert load().values["max_queue_size"] == 256
    assert load(yaml_path=yaml, typed={"max_queue_size": 0}).values["max_queue_size"] == 0


@pytest.mark.parametrize("engine", ["embedded", "mocker", "trtllm", "vllm"])
@pytest.mark.parametrize("text", ["max_queue_size: -1\n", "max_queue_size: many\n"])
def test_every_engine_refuses_a_queue_of_another_size(engine: str, text: str, tmp_path: Path) -> None:
    yaml = tmp_path / "engine.yaml"
    yaml.write_text(text)
    with pytest.raises(SettingsError, match="max_queue_size"):
        built("--engine", engine, "--extra-engine-args", str(yaml))
