"""Building an engine: its imports are not interrupted by the garbage collector."""

import gc
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from baton.flags import parse
from tests.certificates import Authority
from workers.engines.build import build_engine
from workers.engines.choose import with_engine
from workers.engines.loading import dying_at_once, importing
from workers.flags import WorkerSettings
from workers.settings_text import SettingsError


def test_no_garbage_is_collected_while_an_engine_is_imported() -> None:
    began: list[str] = []
    line = ["--engine", "mocker", "--model-path", "models/demo"]
    parsed = parse(WorkerSettings, line, prog="p", description="d", environ={})
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: began.append(phase))
    try:
        gc.set_threshold(1)
        build_engine(parsed, ("w", "i"))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert len(began) < 200  # before and after the imports; hundreds otherwise


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def effective(*arguments: str) -> list[str]:
    """The lines of the engine's settings."""
    line = ["--model-path", "models/demo", *arguments]
    return build_engine(parse(WorkerSettings, line, prog="p", description="d", environ={}), ("w", "i"))[1]


def test_what_is_overridden_counts() -> None:
    lines = effective("--engine", "mocker", "--override-engine-args", '{"decode_step_ms": 7}')
    assert any(line.startswith("decode_step_ms=7.0 (--override-engine-args") for line in lines), lines


@pytest.mark.parametrize("chosen", [["--engine", "embedded"], []])
def test_an_engine_by_default_is_named_with_what_it_refuses(chosen: list[str]) -> None:
    line = [*chosen, "--model-path", "models/demo", "--override-engine-args", '{"nope": 1}']
    typed = parse(WorkerSettings, line, prog="p", description="d", environ={})
    parsed = with_engine(typed, is_installed=lambda name: name not in {"tensorrt_llm", "vllm"})
    with pytest.raises(SettingsError, match="nope") as refused:
        build_engine(parsed, ("w", "i"))
    assert ("--engine defaults to embedded here" in str(refused.value)) is not bool(chosen)


def test_vllm_gets_a_model_folder_that_holds_in_every_working_directory() -> None:
    lines = effective("--engine", "vllm", "--disaggregation-mode", "agg")
    assert f"model={Path('models/demo').absolute()} " in "".join(lines)


def test_signals_end_the_process_while_an_engine_loads_and_are_handled_again_then() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with suppress(ValueError), dying_at_once():
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise ValueError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_engine_that_loads_in_another_thread_leaves_signals_alone() -> None:
    def load() -> object:
        with dying_at_once():
            return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(load).result() is before


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
    build_engine(parse(WorkerSettings, line, prog="p", description="d", environ={}), ("w", "i"))
    assert ("trtllm moves KV itself, without the TLS of BATON_PEER_CERT" in caplog.text) == is_told
