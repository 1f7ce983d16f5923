"""A worker's flags: its role, its names, and which flags set engine settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.connect import Wires
from baton.flags import parse
from baton.messages import Role
from tests.waiting import PATIENCE_S
from workers.flags import DisaggregationMode, WorkerSettings, typed_engine_flags


@pytest.mark.parametrize(
    ("mode", "role", "component", "dynamos"),
    [
        ("prefill", Role.PREFILL, "prefill", "prefill"),
        ("decode", Role.DECODE, "tensorrt_llm", "backend"),
        ("agg", Role.DECODE, "tensorrt_llm", "backend"),
    ],
)
def test_the_mode_says_role_and_endpoint(
    mode: DisaggregationMode, role: Role, component: str, dynamos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(disaggregation_mode=mode)
    assert (settings.role, settings.route) == (role, f"dyn://dynamo.{component}.generate")
    monkeypatch.setenv("DYN_NAMESPACE", "mine")
    settings = WorkerSettings(disaggregation_mode=mode, wires=Wires(request_plane="dynamo"))
    assert settings.route == f"dyn://mine.{dynamos}.generate"


def test_an_endpoint_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="dyn://namespace"):
        WorkerSettings(endpoint="http://a.b.c")


@pytest.mark.parametrize("name", ["a b", "-x", "a\n", "x" * 64, "d{0}", "décode", "a/b", '"'])
def test_a_name_that_would_not_fit_a_label_is_refused_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(WorkerSettings, [f"--name={name}"], prog="workers", description="")
    error = capsys.readouterr().err
    assert error.startswith("error: --name ")
    assert error.count("\n") == 1


def test_flags_that_were_typed_are_settings_of_the_engine_and_no_others() -> None:
    argv = [
        "--max-batch-size=1", "--max-num-tokens=2", "--max-seq-len=3", "--free-gpu-memory-fraction=0.4",
        "--tensor-parallel-size=5", "--expert-parallel-size=6", "--max-queue-size=7",
    ]  # fmt: skip
    typed = {
        "max_batch_size": 1, "max_num_tokens": 2, "max_seq_len": 3, "tensor_parallel_size": 5,
        "kv_cache_config.free_gpu_memory_fraction": 0.4, "moe_expert_parallel_size": 6, "max_queue_size": 7,
    }  # fmt: skip

    def engine_flags(*given: str) -> dict[str, object]:
        return typed_engine_flags(parse(WorkerSettings, given, prog="p", description="d", environ={}))

    assert engine_flags(*argv) == typed
    assert engine_flags() == {}
    assert engine_flags("--max-seq-len=3") == {"max_seq_len": 3}


@pytest.mark.parametrize(
    ("text", "environ", "status", "says"),
    [
        ("max_batch_size: 4", {}, 0, "engine settings max_batch_size=4"),
        (
            "max_batchsize: 4",
            {},
            2,
            "engine.yaml: max_batchsize: unknown key; did you mean max_batch_size?",
        ),
        ("max_batch_size: 4", {"BATON_PEER_CERT": "cert.pem"}, 2, "BATON_PEER_CA: set all three, or none"),
        (
            "max_batch_size: 4",
            {"BATON_FILE_REGISTRY": "/proc/none"},
            2,
            "registry /proc/none cannot be created",
        ),
    ],
)
def test_a_check_says_what_is_wrong_and_starts_nothing(
    tmp_path: Path, text: str, environ: dict[str, str], status: int, says: str
) -> None:
    (tmp_path / "engine.yaml").write_text(text)
    command = [sys.executable, "-m", "workers", "--check", "--engine", "mocker"]
    command += ["--extra-engine-args", str(tmp_path / "engine.yaml")]
    environ = os.environ | {"BATON_FILE_REGISTRY": str(tmp_path / "registry")} | environ

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environ
    )

    assert done.returncode == status
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "ready worker=" not in done.stderr
