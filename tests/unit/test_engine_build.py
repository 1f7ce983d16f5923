"""Building an engine: its imports are not interrupted by the garbage collector."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from baton.flags import parse
from tests.certificates import Authority
from workers.engines.build import build_engine, given_settings
from workers.engines.library.engine import dying_at_once
from workers.flags import WorkerSettings
from workers.settings import Given, SettingsError


def built(*arguments: str) -> tuple[Any, list[str]]:
    """An engine for the demo model, and the lines of its settings."""
    line = ["--model-path", "models/demo", *arguments]
    return build_engine(parse(WorkerSettings, line, prog="p", description="d", environ={}))


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


@pytest.mark.parametrize("engine", ["trtllm", "vllm", "mocker"])
def test_a_folder_without_a_model_or_with_a_broken_one_is_refused(tmp_path: Path, engine: str) -> None:
    line = ["--engine", engine, "--model-path", str(tmp_path)]
    with pytest.raises(SettingsError, match=r"no config\.json in this folder"):
        built(*line)
    if engine != "mocker":
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(SettingsError, match=r"--model-path .*config\.json: Expected `object`"):
            built(*line)


@pytest.mark.parametrize("engine", ["embedded", "mocker", "trtllm", "vllm"])
def test_settings_are_checked_as_a_worker_does_before_its_engine_is_loaded(engine: str) -> None:
    def given(*arguments: str) -> Given:
        line = ["--model-path", "models/demo", "--engine", engine, *arguments]
        return given_settings(parse(WorkerSettings, line, prog="p", description="d", environ={}))

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


def test_signals_end_the_process_while_an_engine_loads_and_are_handled_again_then() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with suppress(ValueError), dying_at_once():
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise ValueError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


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
    build_engine(parse(WorkerSettings, line, prog="p", description="d", environ={}))
    assert ("trtllm moves KV itself, without the TLS of BATON_PEER_CERT" in caplog.text) == is_told
