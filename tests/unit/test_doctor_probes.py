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

from baton.flags import parse
from operations.doctor import probes
from operations.doctor.command import DoctorSettings, gather, wanted_workers
from operations.doctor.facts import GIB, Facts
from operations.doctor.probes import parse_gpus, probe_gpus, probe_model
from tests.recorded_smi import RECORDINGS as SMI
from tests.recorded_smi import recorded_smi
from tests.waiting import PATIENCE_S

DEMO = Path("models/demo")


def script(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that PATH has first."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_recorded_gpus_are_read_and_other_lines_skipped() -> None:
    noise = "No devices were found\n\nNVIDIA-SMI has failed, because\n"
    (gpu,) = parse_gpus(noise + (SMI / "h200_query.csv").read_text())
    assert (gpu.name, gpu.driver, gpu.compute) == ("NVIDIA H200", "580.159.04", (9, 0))
    assert (gpu.total_bytes or 0) // GIB == 140
    assert parse_gpus(noise) == ()


@pytest.mark.parametrize(
    ("text", "num_gpus", "problem"),
    [
        ("echo 'No devices were found'; exit 6", 0, "No devices were found"),
        ("echo 'cannot talk to the driver' >&2; exit 9", 0, "cannot talk to the driver"),
        ("exit 9", 0, "nvidia-smi exits with status 9"),
        (f'case "$1" in *memory*) cat {SMI}/h200_query.csv;; esac', 1, None),
    ],
)
def test_a_failure_of_nvidia_smi_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, num_gpus: int, problem: str | None
) -> None:
    script(tmp_path, "nvidia-smi", text, monkeypatch)
    seen = probe_gpus()
    assert (len(seen.gpus), seen.problem) == (num_gpus, problem)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert probe_gpus().problem == "nvidia-smi is not installed"


def test_an_nvidia_smi_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.05)
    script(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    assert (probes.probe_gpus().problem or "").startswith("nvidia-smi hangs")


def test_a_shard_cut_short_and_a_missing_one_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((DEMO / "model.safetensors").read_bytes()[:1_000_000])
    (tmp_path / "c.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    names = ["a.safetensors", "b.safetensors", "c.safetensors", f"../{tmp_path.name}/c.safetensors"]
    index = {"weight_map": dict(zip("xyzw", names, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = probe_model(tmp_path)
    outside, cut, missing, pointer = model.shards
    assert outside.size_bytes is None
    assert (cut.size_bytes, (cut.whole_bytes or 0) > 1_000_000) == (1_000_000, True)
    assert missing.size_bytes is None
    assert (pointer.size_bytes, pointer.whole_bytes) == (57, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": 7}', ""])
def test_a_bad_config_is_a_problem_and_no_exception(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    model = probe_model(tmp_path)
    assert set(model.bad_files) == {"config.json", "model.safetensors.index.json"}
    assert model.shape is None


@given(st.binary(max_size=200) | st.text().map(str.encode))
@example(b"[" * 3000)
def test_no_file_makes_the_probes_fail(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            (folder / file).write_bytes(content)
        (folder / "a.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
        model = probe_model(folder)
        assert model.bad_files["config.json"]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, (64 << 20) + 1)  # without using the disk
    model = probe_model(tmp_path)
    assert all("larger than" in model.bad_files[name] for name in ("config.json", "tokenizer.json"))


def test_pipes_are_not_waited_for_and_a_name_that_is_too_long_is_a_problem(tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors"):
        os.mkfifo(tmp_path / name)
    assert probe_model(tmp_path).shape is None
    assert probe_model(tmp_path / ("a" * 300)).folder_problem == "File name too long"


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
    assert worker.number("kv_cache_config.free_gpu_memory_fraction") == 0.7
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
def test_doctor_says_on_a_machine_without_gpu_that_the_demo_is_all_it_runs() -> None:
    done = _doctor()
    assert (done.returncode, done.stderr) == (0, "")
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("seen     no NVIDIA GPU (")
    assert last == "result   nothing found"


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
    assert report["seen"][0] == "8 x NVIDIA B200, 179 GiB each, driver 580.95.05"
    (shared,) = [finding for finding in report["findings"] if finding["code"] == "gpu-shared"]
    assert set(shared) == {"severity", "code", "fact", "breaks", "repair"}


def gathered(*arguments: str) -> Facts:
    line = ["--http-port", "0", "--model-path", "models/none", *arguments]
    return gather(parse(DoctorSettings, line, prog="p", description="d", environ={}).settings)


def test_what_keeps_a_process_from_its_start_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no tools
    own, shared = ("--file-registry", str(tmp_path / "own")), tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    facts = gathered(*own)
    assert (facts.start_problem, facts.http_port_problem) == (None, None)
    facts = gathered(*own, "--http-host", "192.0.2.1", "--host", "192.0.2.1")
    assert facts.http_port_problem
    assert "192.0.2.1" in (facts.start_problem or "")
    assert str(shared) in (gathered("--file-registry", str(shared)).start_problem or "")


def test_each_server_in_use_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    closed = "http://127.0.0.1:9, http://127.0.0.1:10/"
    facts = gathered("--discovery-backend", "etcd", "--etcd-endpoints", closed)
    assert [(s.name, s.url) for s in facts.services] == [
        ("etcd", "http://127.0.0.1:9"),
        ("etcd", "http://127.0.0.1:10"),
    ]
    urls = "nats://127.0.0.1:9,nats://127.0.0.1:10"
    line = ["--file-registry", str(tmp_path / "own"), "--request-plane", "nats", "--nats-server", urls]
    assert [(s.name, s.url) for s in gathered(*line).services] == [("NATS", url) for url in urls.split(",")]
