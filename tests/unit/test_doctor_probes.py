"""Doctor's probes: recorded nvidia-smi output, model folders whole and broken, YAMLs, and this machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from operations.doctor import probes
from operations.doctor.command import DoctorSettings, gather, wanted_workers
from operations.doctor.facts import GIB
from operations.doctor.probes import parse_gpus, probe_gpus, probe_model
from tests.fake_gpu import RECORDINGS as SMI
from tests.fake_gpu import recorded_smi
from tests.waiting import PATIENCE_S

DEMO = Path("models/demo")


def script(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that PATH has first."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_recorded_gpus_are_read_and_other_lines_skipped() -> None:
    noise = "No devices were found\n\nNVIDIA-SMI has failed, because\n"
    (gpu,) = parse_gpus(noise + (SMI / "h200_query.csv").read_text(), "")
    assert (gpu.name, gpu.total_bytes // GIB) == ("NVIDIA H200", 140)
    assert parse_gpus(noise, "") == ()


@pytest.mark.parametrize(
    ("text", "num_gpus", "problem"),
    [
        ("echo 'No devices were found'; exit 6", 0, "No devices were found"),
        ("exit 0", 0, "nvidia-smi lists none"),
        ("echo 'cannot talk to the driver' >&2; exit 9", 0, "cannot talk to the driver"),
        ("exit 9", 0, "nvidia-smi exits with status 9"),
        (f'case "$1" in *memory*) cat {SMI}/h200_query.csv;; esac', 1, None),
    ],
)
def test_a_failure_of_nvidia_smi_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, num_gpus: int, problem: str | None
) -> None:
    script(tmp_path, "nvidia-smi", text, monkeypatch)
    gpus, found = probe_gpus()
    assert (len(gpus), found) == (num_gpus, problem)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert probe_gpus() == ((), "nvidia-smi is not installed")


def test_an_nvidia_smi_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.05)
    script(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    assert (probe_gpus()[1] or "").startswith("nvidia-smi hangs")


def test_files_that_are_not_there_are_missing(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "tokenizer.json").touch()
    model = probe_model(tmp_path)
    assert (model.num_layers, model.weight_bytes, model.missing) == (8, 1000, ())
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert probe_model(tmp_path).missing == ("b.safetensors",)
    assert probe_model(DEMO).missing == ()


def test_a_folder_that_this_user_cannot_read_is_not_empty() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0)
        try:
            if user == 0:  # who could read it
                os.seteuid(65534)
            assert probe_model(Path(name)).problem == "Permission denied"
        finally:
            os.seteuid(user)
            Path(name).chmod(0o700)


@given(st.binary(max_size=200) | st.text().map(str.encode))
@example(b"[" * 3000)
@example(b'{"weight_map": {"x": "a\\u0000"}}')
def test_no_file_makes_the_probes_fail(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            (folder / file).write_bytes(content)
        assert probe_model(folder).num_layers is None


def test_neither_pipes_nor_huge_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors.index.json").touch()
    os.truncate(tmp_path / "model.safetensors.index.json", (64 << 20) + 1)  # without using the disk
    assert "config.json" in probe_model(tmp_path).missing
    assert probe_model(tmp_path / ("a" * 300)).problem == "File name too long"


def wanted(settings: DoctorSettings, visible: str | None = None) -> list[tuple[str, str | None]]:
    return [(worker.mode, worker.gpus) for worker in wanted_workers(settings, visible)]


def test_workers_come_from_the_flags_else_one_is_on_the_visible_devices() -> None:
    settings = DoctorSettings(
        prefill_gpus="0,1;2,3", decode_engine_args=Path("engine_configs/demo/decode.yaml")
    )
    assert wanted(settings) == [("prefill", "0,1"), ("prefill", "2,3"), ("decode", None)]
    assert wanted(DoctorSettings(), "1,2") == [("agg", "1,2")]
    assert wanted(DoctorSettings(), "") == [("agg", None)]


def test_a_typed_flag_overrides_the_yaml_and_the_last_one_counts() -> None:
    yaml = Path("engine_configs/gpt-oss-120b/prefill.yaml")
    line = "--log-level info --tensor-parallel-size 8 --tensor-parallel-size=2 --free-gpu-memory-fraction 0.7"
    settings = DoctorSettings(prefill_gpus="0,1", prefill_flags=line, prefill_engine_args=yaml)
    (worker,) = wanted_workers(settings, None)
    assert worker.tensor_parallel_size == 2
    assert worker.given["kv_cache_config.free_gpu_memory_fraction"] == 0.7
    assert worker.number("max_batch_size") == 32


def _doctor(*arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    names = ("ETCD_ENDPOINTS", "NATS_SERVER", "CUDA_VISIBLE_DEVICES", "DYN_HTTP_PORT", "HTTP_PORT")
    environ = {key: value for key, value in os.environ.items() if key not in names}
    if path:
        environ["PATH"] = f"{path}:{environ['PATH']}"
    environ |= variables
    command = [sys.executable, "-m", "baton", "doctor", "--http-port", "18431", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=PATIENCE_S, check=False
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_doctor_finds_nothing_wrong_with_the_demo_on_a_machine_without_gpu() -> None:
    done = _doctor()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "result   nothing found\n"


def test_doctor_reads_a_whole_node_and_prints_json(tmp_path: Path) -> None:
    recorded_smi(tmp_path)
    configs = "engine_configs/gpt-oss-120b"
    done = _doctor(
        "--json", "--model-path", "models/demo", "--prefill-gpus", "0,1,2,3", "--decode-gpus", "3,4,5,6",
        "--prefill-engine-args", f"{configs}/prefill.yaml", "--decode-engine-args", f"{configs}/decode.yaml",
        path=tmp_path,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 2
    (shared,) = [finding for finding in report["findings"] if finding["code"] == "gpu-shared"]
    assert set(shared) == {"severity", "code", "fact", "breaks", "repair"}


def test_an_address_that_the_frontend_cannot_have_is_found() -> None:
    assert gather(DoctorSettings(http_port=0, http_host="192.0.2.1")).port_problem
