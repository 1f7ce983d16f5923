"""`launch/gpt_oss_vllm.sh --one-gpu` with a driver of scripts and the mocker as the engine."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fake_gpu
from tests.answers import Stream, read_all, whole_answer
from tests.fake_gpu import SHAPE_20B
from tests.launched import Run
from tests.stack import ROOT, Stack
from tests.system.test_launch_commands import dry_run, frontend
from tests.waiting import PATIENCE_S, wait_for

SCRIPT = "gpt_oss_vllm.sh"
SHAPE_120B = SHAPE_20B | {"num_hidden_layers": 36}


def folder_of(path: Path, shape: dict[str, object]) -> str:
    """A model's folder without weights: the published ones count."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape))
    return str(path)


def lines_of(folder: Path, *flags: str, num_gpus: int = 1, mps: str | None = "", **more: str) -> list[str]:
    """Of a dry run on one of these GPUs."""
    environ = fake_gpu.install(folder / "bin", num_gpus=num_gpus, mps=mps) | more
    environ |= {"PYTHON": sys.executable, "MODEL_PATH": folder_of(folder / "20b", SHAPE_20B)}
    return dry_run(SCRIPT, "20b", "--one-gpu", *flags, **environ)


def test_both_roles_get_half_of_what_the_weights_leave_and_prefill_a_share_of_the_sms(tmp_path: Path) -> None:
    override = '--override-engine-args {"max_num_seqs":16}'
    lines = lines_of(tmp_path, "--prefill-sm-share", "70", PREFILL_EXTRA_FLAGS=override)

    prefill, decode = (shlex.split(line) for line in lines if " -m workers " in line)
    assert prefill[:3] == [
        "CUDA_VISIBLE_DEVICES=0",
        "CUDA_MPS_CLIENT_PRIORITY=1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=70",
    ]
    assert not [word for word in decode if word.startswith("CUDA_MPS")]
    given, ours = (json.loads(words[-2]) for words in (decode, prefill))
    assert ours == given | {"max_num_seqs": 16}
    assert 0.4 < given["gpu_memory_utilization"] < 0.5
    assert 20e9 < given["kv_cache_memory_bytes"] < 25e9
    assert " --wait-for-worker-s 300" in frontend(lines)
    assert [line for line in lines if line.startswith("export CUDA_MPS_PIPE_DIRECTORY=")]
    limit = f"export PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:{given['gpu_memory_utilization']}"
    assert limit in [line.replace("\\", "") for line in lines]


def test_mps_serves_no_other_gpu_of_the_host(tmp_path: Path) -> None:
    seen = [line for line in lines_of(tmp_path, num_gpus=4) if "CUDA_VISIBLE_DEVICES=" in line]
    assert [line.split()[0] for line in seen] == ["CUDA_VISIBLE_DEVICES=GPU-1"] * 3


def test_a_dry_run_without_mps_is_a_script_and_keeps_pytorchs_setting(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, mps=None, PYTORCH_ALLOC_CONF="max_split_size_mb:512")
    assert [line for line in lines if line.startswith("# one GPU: time slices")]
    assert not [line for line in lines if "per_process_memory_fraction" in line]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--one-gpu --prefill-sm-share 0", "--prefill-sm-share 0: must be 1 to 100"),
        ("--one-gpu --prefill-sm-share 101", "--prefill-sm-share 101: must be 1 to 100"),
        ("--one-gpu --prefill-sm-share", "--prefill-sm-share : must be 1 to 100"),
        ("--prefill-sm-share 60", "--prefill-sm-share: needs --one-gpu"),
        ("--one-gpu --agg", "--one-gpu and --agg: give one of them"),
        ("--one-gpu", "CUDA_MPS_PIPE_DIRECTORY=/none: no MPS runs there"),
    ],
)
def test_a_wrong_share_is_one_sentence(run: Run, arguments: str, says: str) -> None:
    status, output = run(f"{SCRIPT} 20b {arguments}", {}, CUDA_MPS_PIPE_DIRECTORY="/none").end()
    assert (status, output.startswith(f"error: {says}"), output.count("\n")) == (2, True, 1)


@pytest.mark.parametrize(
    ("shape", "total_gib", "says"),
    [
        (SHAPE_20B, 24, "= 35.4 GiB, but 23.5 GiB of GPU 0"),
        (SHAPE_120B, 139.8, "+ 17.5 GiB of working memory) + 1.0 GiB = 161.2 GiB, but 139.3 GiB of GPU 0"),
    ],
)
def test_a_gpu_too_small_for_two_copies_is_a_sum_before_anything_loads(
    run: Run, tmp_path: Path, shape: dict[str, object], total_gib: float, says: str
) -> None:
    environ = fake_gpu.install(tmp_path / "bin", total_gib=total_gib)
    environ["MODEL_PATH"] = folder_of(tmp_path / "model", shape)
    status, output = run(f"{SCRIPT} --one-gpu", {}, **environ).end()
    assert (status, output.count("\n")) == (1, 1)
    assert says in output
    assert not list((tmp_path / "run").glob("*.log"))


@pytest.mark.parametrize(
    ("changes", "environ", "says", "limits"),
    [
        ({}, {}, "one GPU: MPS, prefill on at most 60 %", "2 100 mps"),
        ({"mps": None}, {}, "nvidia-cuda-mps-control is not on the PATH", "0 none no-mps"),
        ({"mps": "exit 1"}, {}, "MPS does not start", "0 none no-mps"),
        ({"processes": "nvidia-cuda-mps-server"}, {}, "GPU 0 has the MPS server of another", "0 none no-mps"),
        ({}, {"NO_MPS": "1"}, "time slices, without a limit for prefill: NO_MPS is set", "0 none no-mps"),
        ({}, {"CUDA_MPS_PIPE_DIRECTORY": "/their/mps"}, "one GPU: the MPS of /their/mps", "2 none mps"),
    ],
)
def test_without_mps_of_its_own_the_roles_take_turns(
    tmp_path: Path, changes: dict[str, str | None], environ: dict[str, str], says: str, limits: str
) -> None:
    script = """. launch/trtllm.sh; . launch/one_gpu.sh; FOLLOW=; start_mps 0 60
        share=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE-none}
        echo "limits: ${#PREFILL_ENVIRONMENT[@]} $share ${CUDA_MPS_PIPE_DIRECTORY##*/}"; end_all"""
    environ = {"RUN_DIR": str(tmp_path / "run"), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60"} | environ
    environ |= fake_gpu.install(tmp_path / "bin", **changes)  # type: ignore[arg-type]  # names of its arguments
    command = ["bash", "-euc", script]
    output = subprocess.check_output(command, env=environ, cwd=ROOT, text=True, timeout=PATIENCE_S)
    assert says in output
    assert f"limits: {limits}\n" in output


def test_a_stack_ends_while_its_mps_does_not_answer(run: Run, tmp_path: Path) -> None:
    limits = {"MPS_START_S": "900", "STOP_TIMEOUT_S": "900"}
    launch = run(f"{SCRIPT} 20b --one-gpu", **fake_gpu.install(tmp_path / "bin", mps="sleep 900"), **limits)
    wait_for(lambda: any("mps-control -f" in command for command in launch.processes().values()))
    launch.stop()
    assert launch.processes() == {}


def test_streams_outlive_mps_and_both_roles(run: Run, tmp_path: Path) -> None:
    launch = run(f"{SCRIPT} 20b --one-gpu", **fake_gpu.install(tmp_path / "bin"))
    launch.read_until("ready:")
    stack = Stack(tmp_path)
    stack.url = launch.url
    expected = whole_answer(stack)
    streams = [Stream(stack).read(3) for _ in range(2)]
    for words in ("bin/nvidia-cuda-mps-control -f", "-mode prefill", "-mode decode"):
        os.kill(launch.pid_of(words), signal.SIGKILL)
    read_all(streams, expected)
    stack.stop()
    output = "".join(launch.read_until("restarting it") for _ in range(3))
    for name in ("mps", "prefill-0", "decode-0"):
        assert f"\n{name} was killed by SIGKILL; restarting it" in output
    wait_for(lambda: any("mps-control -f" in command for command in launch.processes().values()))
    launch.stop()
    assert launch.processes() == {}
