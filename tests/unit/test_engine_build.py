"""Building an engine: its imports are not interrupted by the garbage collector."""

import gc
from pathlib import Path

import pytest

from baton.flags import parse
from tests.certificates import Authority
from workers.engines.build import build_engine
from workers.engines.loading import importing
from workers.flags import WorkerSettings


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
