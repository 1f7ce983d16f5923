"""vLLM's double against the recorded facts of the real one, including its traps."""

import dataclasses
import inspect
import os
import re
import socket
from pathlib import Path

import pytest
from vllm import triton_utils
from vllm.config import KVTransferConfig, StructuredOutputsConfig
from vllm.contract import FACTS
from vllm.distributed.kv_transfer import ConnectorWorker
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput, RequestStateStats, SchedulerStats
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from tests.engine_calls import ask, next_handoff
from tests.vllm_engine import new_engine, started
from workers.engines.library.engine import opened
from workers.engines.vllm.adapter import KEEP
from workers.engines.vllm.library import WORKER_PID, load_library
from workers.engines.vllm.settings import SECOND_RUNNER
from workers.flags import DisaggregationMode
from workers.settings import SettingsError

ROOT = Path(__file__).parents[2]
BUILT = {
    "AsyncEngineArgs": AsyncEngineArgs,
    "KVTransferConfig": KVTransferConfig,
    "StructuredOutputsConfig": StructuredOutputsConfig,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
}
READ = {
    "RequestOutput": RequestOutput,
    "CompletionOutput": CompletionOutput,
    "RequestStateStats": RequestStateStats,
    "SchedulerStats": SchedulerStats,
}


@pytest.mark.parametrize("name", BUILT)
def test_what_baton_builds_has_the_recorded_names_and_refuses_others(name: str) -> None:
    recorded = {field: default for field, (_, default) in FACTS[name].items() if default != "<made>"}
    found = {field.name: field.default for field in dataclasses.fields(BUILT[name])}
    assert set(found) == set(FACTS[name])
    assert {field: found[field] for field in recorded} == recorded
    with pytest.raises(TypeError):
        BUILT[name](no_such_field=1)


@pytest.mark.parametrize("name", FACTS["AsyncLLM"])
def test_the_methods_have_the_recorded_signatures(name: str) -> None:
    parts = []
    for parameter in inspect.signature(getattr(AsyncLLM, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        given = parameter.default is not parameter.empty
        parts.append(f"{parameter.name}={parameter.default!r}" if given else parameter.name)
    found = [part for part in parts if part.partition("=")[0] not in {"self", "usage_context"}]
    assert found == FACTS["AsyncLLM"][name]


@pytest.mark.parametrize("name", READ)
def test_what_baton_reads_is_there(name: str) -> None:
    assert {field.name for field in dataclasses.fields(READ[name])} >= set(FACTS["read"][name])


async def test_nixls_books_and_parameters_have_the_recorded_names(checkpoint: Path) -> None:
    async with started(checkpoint) as engine:
        replies = engine.prefill(ask())
        handoff = await next_handoff(replies)
        await replies.aclose()
    params = opened(handoff, 41).params
    assert set(params) - {"double_handoff"} == set(FACTS["nixl_params"])
    assert set(KEEP) <= set(FACTS["nixl_params"])
    assert set(vars(ConnectorWorker())) <= set(FACTS["nixl_worker"])


def test_vllm_is_imported_in_one_file_and_by_what_runs_inside_it() -> None:
    imports = re.compile(r"^\s*(from|import) vllm|import_module\(\"vllm", re.MULTILINE)
    found = [path.name for path in (ROOT / "workers").rglob("*.py") if imports.search(path.read_text())]
    inside = ["connector.py", "draws.py", "inside.py", "kernels.py", "library.py", "release.py"]
    assert sorted(found) == inside


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_nixl_listens_on_the_workers_host_below_the_ephemeral_ports(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"VLLM_NIXL_SIDE_CHANNEL_{name}", raising=False)
    load_library(host)
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
    assert 20_000 <= int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]) < 32_000


@pytest.mark.parametrize("theirs", [None, "12345"])
def test_what_vllm_reads_from_the_environment_is_set_unless_the_user_did(
    theirs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    }
    for name in ours:
        monkeypatch.setenv(name, theirs or "")
        if theirs is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "23456")
    monkeypatch.setenv(WORKER_PID, "1")  # of a worker that started this one
    load_library()
    assert {name: os.environ[name] for name in ours} == (dict.fromkeys(ours, theirs) if theirs else ours)
    assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "23456"
    assert os.environ[WORKER_PID] == str(os.getpid())


@pytest.mark.parametrize(
    ("version", "theirs", "has_triton", "runner"),
    [
        ("0.26.0", None, True, "1"),
        ("0.26.0", "0", True, "0"),
        ("0.26.0", None, False, None),
        ("0.29.0", None, True, None),  # its default
    ],
)
def test_the_runner_whose_draws_can_be_repeated_is_taken_if_it_works(
    version: str, theirs: str | None, has_triton: bool, runner: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(triton_utils, "HAS_TRITON", has_triton)
    monkeypatch.delenv(SECOND_RUNNER, raising=False)
    if theirs is not None:
        monkeypatch.setenv(SECOND_RUNNER, theirs)
    load_library()
    assert os.environ.get(SECOND_RUNNER) == runner


def test_a_build_without_a_class_that_is_needed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "23456")
    monkeypatch.delattr("vllm.v1.engine.exceptions.EngineDeadError")
    with pytest.raises(SettingsError, match=r"vLLM cannot be imported: .*EngineDeadError.*pip install"):
        load_library()


def test_ports_that_are_taken_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        ports = [taken.getsockname()[1], port]
        probe.close()
        monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
        monkeypatch.setattr("random.sample", lambda *_: ports)
        load_library()
    assert os.environ.pop("VLLM_NIXL_SIDE_CHANNEL_PORT") == str(port)


async def test_what_only_the_other_runner_can_do_names_its_switch(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=f"dual batch overlap; or set {SECOND_RUNNER}=0"):
        await new_engine(checkpoint, enable_dbo=True).start()


@pytest.mark.parametrize(
    ("version", "mode", "is_refused"),
    [
        ("0.25.1", "decode", False),
        ("0.26.0", "prefill", False),
        ("0.24.0", "prefill", True),
        ("0.27.1", "prefill", True),
        ("0.33.0", "decode", True),
        ("1.0.0", "decode", True),
        ("0.33.0", "agg", False),
    ],
)
def test_another_release_serves_aggregated_only(
    version: str,
    mode: DisaggregationMode,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    if is_refused:
        with pytest.raises(SettingsError, match=rf"{version}: .* 0\.25 or 0\.26, .*-mode agg"):
            load_library(mode=mode)
    else:
        assert load_library(mode=mode).version == version
        assert bool(caplog.records) == (mode == "agg")


def test_a_host_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_PORT", raising=False)
    with pytest.raises(SettingsError, match=r"--host 192\.0\.2\.1: no port for NIXL's side channel"):
        load_library("192.0.2.1")
