"""The gpt-oss launch scripts' dry runs: the guides' commands, flag by flag."""

import os
import re
import shlex
import socket
import subprocess
from typing import Any

import pytest
import yaml

from tests.launched import Run
from tests.stack import ROOT
from tests.waiting import PATIENCE_S

# Dynamo's guide for gpt-oss-120b on one B200 node, "Option B: Manual Launch".
GUIDE_FRONTEND = "python3 -m dynamo.frontend --router-mode round-robin --http-port 8000"
GUIDE_PREFILL = """CUDA_VISIBLE_DEVICES=0,1,2,3 python3 -m dynamo.trtllm
    --model-path /model --served-model-name openai/gpt-oss-120b
    --extra-engine-args examples/backends/trtllm/engine_configs/gpt-oss-120b/prefill.yaml
    --dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony --disaggregation-mode prefill
    --max-num-tokens 20000 --max-batch-size 32 --free-gpu-memory-fraction 0.9
    --tensor-parallel-size 4 --expert-parallel-size 4"""
GUIDE_DECODE = """CUDA_VISIBLE_DEVICES=4,5,6,7 python3 -m dynamo.trtllm
    --model-path /model --served-model-name openai/gpt-oss-120b
    --extra-engine-args examples/backends/trtllm/engine_configs/gpt-oss-120b/decode.yaml
    --dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony --disaggregation-mode decode
    --max-num-tokens 16384 --free-gpu-memory-fraction 0.9
    --tensor-parallel-size 4 --expert-parallel-size 4"""
GUIDE_ENVIRONMENT = {"TRTLLM_ENABLE_PDL": "1", "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "True"}


def counterpart(command: str) -> str:
    """A guide's command in Baton's terms: other modules, other folder, the engine and the worker named."""
    name = "prefill-0" if command is GUIDE_PREFILL else "decode-0"
    command = command.replace("python3 -m dynamo.frontend", "python3 -m frontend")
    command = command.replace("python3 -m dynamo.trtllm", f"python3 -m workers --engine trtllm --name {name}")
    return " ".join(command.replace("examples/backends/trtllm/", "").split())


def dry_run(script: str, *arguments: str, **environ: str) -> list[str]:
    """The lines that the script prints; it starts nothing and creates no folder."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    run_dir = ROOT / ".run/never-made"
    command = [str(ROOT / "launch" / script), *arguments, "--dry-run"]
    environ = kept | {"PYTHON": "python3", "RUN_DIR": str(run_dir)} | environ
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stderr == ""
    assert not run_dir.exists()
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    return done.stdout.splitlines()


def worker(lines: list[str]) -> tuple[str, dict[str, Any]]:
    """(CUDA_VISIBLE_DEVICES, flags) of the only worker."""
    (line,) = (line for line in lines if " -m workers " in line)
    words = shlex.split(line.removesuffix(" &"))
    flags = words[4:]
    return words[0].removeprefix("CUDA_VISIBLE_DEVICES="), dict(zip(flags[::2], flags[1::2], strict=True))


def _typed(command: str) -> str:
    """The engine's flags, which come last."""
    return re.sub(r".*--disaggregation-mode \w+ ", "", " ".join(command.split()))


def test_the_disaggregated_launch_runs_the_guides_commands() -> None:
    lines = dry_run("gpt_oss_disagg.sh")

    started = [line.removesuffix(" &") for line in lines if re.search(r" -m (frontend|workers) ", line)]
    assert started == [counterpart(command) for command in (GUIDE_FRONTEND, GUIDE_PREFILL, GUIDE_DECODE)]
    for name, value in GUIDE_ENVIRONMENT.items():
        assert f"export {name}={value}" in lines
    configs = "engine_configs/gpt-oss-120b"
    assert (
        "python3 -m baton doctor --engine trtllm --model-path /model "
        f"--prefill-engine-args {configs}/prefill.yaml --decode-engine-args {configs}/decode.yaml "
        "--prefill-gpus 0,1,2,3 --decode-gpus 4,5,6,7 "
        f"'--prefill-flags={_typed(GUIDE_PREFILL)}' '--decode-flags={_typed(GUIDE_DECODE)}' --http-port 8000"
    ) in lines


def test_every_value_can_be_set() -> None:
    lines = dry_run(
        "gpt_oss_disagg.sh",
        MODEL_PATH="/my models/120b",
        SERVED_MODEL_NAME="mine",
        HTTP_HOST="0.0.0.0",
        HTTP_PORT="9000",
        NUM_DECODE="2",
        PREFILL_CUDA_VISIBLE_DEVICES="2,3",
        PREFILL_EXTRA_FLAGS="--max-num-tokens 10000",
        DECODE_ENGINE_ARGS="my.yaml",
        DECODE_FLAGS="",
        ETCD_ENDPOINTS="http://etcd:2379",
        NATS_SERVER="nats://nats:4222",
        TRTLLM_ENABLE_PDL="0",
        SKIP_DOCTOR="1",
    )

    workers = [line for line in lines if " -m workers " in line]
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", "".join(workers)) == ["2,3", "4,5", "6,7"]
    assert re.findall(r"--name (\S+)", "".join(workers)) == ["prefill-0", "decode-0", "decode-1"]
    assert all("--model-path '/my models/120b' --served-model-name mine" in line for line in workers)
    assert workers[0].endswith(
        "--tensor-parallel-size 2 --expert-parallel-size 2 --max-num-tokens 10000 &"  # the last one wins
    )
    assert workers[1].endswith("--extra-engine-args my.yaml --dyn-reasoning-parser gpt_oss "
                               "--dyn-tool-call-parser harmony --disaggregation-mode decode &")  # fmt: skip
    exports = ("HTTP_HOST=0.0.0.0", "ETCD_ENDPOINTS=http://etcd:2379", "NATS_SERVER=nats://nats:4222")
    assert {f"export {pair}" for pair in (*exports, "TRTLLM_ENABLE_PDL=0")} <= set(lines)
    assert not [line for line in lines if line.startswith(("etcd ", "nats-server ")) or "doctor" in line]


def frontend(lines: list[str]) -> str:
    (line,) = (line.removesuffix(" &") for line in lines if " -m frontend " in line)
    return line


@pytest.mark.parametrize(
    "script", ["gpt_oss_disagg.sh", "gpt_oss_agg.sh", "gpt_oss_20b.sh", "gpt_oss_vllm.sh"]
)
def test_every_script_passes_every_flag_to_the_frontend(script: str) -> None:
    lines = dry_run(
        script, REQUEST_TIMEOUT_S="900", FRONTEND_FLAGS="--tls-cert-file c.pem\n--log-level debug"
    )
    assert frontend(lines).endswith(" --request-timeout-s 900 --tls-cert-file c.pem --log-level debug")


LOAD, DAY = " --http-port 8000 --max-wait-s 0", " --http-port 8000 --request-timeout-s 86400 --max-wait-s 0"


@pytest.mark.parametrize(
    ("profiles", "ends", "queue"),
    [
        (["low-latency", "h200-low-latency", "spark"], " --http-port 8000", None),
        (["low-latency-720", "max-throughput", "max-throughput-640", "max-throughput-fp8"], LOAD, 4096),
        (["h200-max-throughput"], LOAD, 4096),
        (["eval-dep-low", "eval-dep-high", "eval-tp-low", "eval-tp-high"], DAY, 4096),
    ],
)
def test_the_guides_loads_may_wait_and_people_may_not(
    profiles: list[str], ends: str, queue: int | None
) -> None:
    for profile in profiles:
        lines = dry_run("gpt_oss_agg.sh", profile)
        assert frontend(lines).endswith(ends)
        _, flags = worker(lines)
        config = yaml.safe_load((ROOT / flags["--extra-engine-args"]).read_text())
        assert config.get("max_queue_size") == queue
    of_the_user = dry_run(
        "gpt_oss_agg.sh", "eval-tp-low", FRONTEND_FLAGS="--max-wait-s 9", REQUEST_TIMEOUT_S="60"
    )
    assert frontend(of_the_user).endswith(" --request-timeout-s 60 --max-wait-s 0 --max-wait-s 9")


@pytest.mark.parametrize(
    ("environ", "host", "port"),
    [
        ({}, "127.0.0.1", "8000"),
        ({"HTTP_HOST": "0.0.0.0", "HTTP_PORT": "8355"}, "0.0.0.0", "8355"),
        ({"DYN_HTTP_HOST": "10.0.0.2", "DYN_HTTP_PORT": "81", "HTTP_HOST": "0.0.0.0"}, "10.0.0.2", "81"),
    ],
)
def test_dynamos_names_of_host_and_port_overrule_the_images(
    environ: dict[str, str], host: str, port: str
) -> None:
    lines = dry_run("gpt_oss_disagg.sh", **environ)

    assert f"export HTTP_HOST={host}" in lines
    assert frontend(lines).endswith(f"--http-port {port}")


@pytest.mark.parametrize("flags", ["--http-port 9000", "--log-level debug\n--http-host=::"])
def test_an_address_among_the_frontends_flags_is_refused(run: Run, flags: str) -> None:
    """The script waits for the frontend at its own HTTP_HOST and HTTP_PORT."""
    status, output = run("gpt_oss_agg.sh --dry-run", FRONTEND_FLAGS=flags).end()
    assert status == 1
    assert output.endswith("error: set HTTP_HOST and HTTP_PORT, not their flags in FRONTEND_FLAGS\n")


@pytest.mark.parametrize(
    ("environ", "used"),
    [
        ({}, ("file", "tcp")),
        ({"ETCD_ENDPOINTS": "http://etcd:2379"}, ("etcd", "tcp")),
        ({"NATS_SERVER": "nats://nats:4222"}, ("file", "nats")),
        ({"ETCD_ENDPOINTS": "http://etcd:2379", "BATON_DISCOVERY_BACKEND": "file"}, ("file", "tcp")),
    ],
)
def test_a_launch_takes_etcd_and_nats_where_they_are_named_and_starts_neither(
    environ: dict[str, str], used: tuple[str, str]
) -> None:
    if any(_listens(port) for port in (2379, 4222)):
        pytest.skip("etcd or NATS listens on this machine, and would be taken")
    lines = dry_run("gpt_oss_agg.sh", **environ)

    registry, plane = used
    assert {f"export BATON_DISCOVERY_BACKEND={registry}", f"export BATON_REQUEST_PLANE={plane}"} <= set(lines)
    assert not [line for line in lines if line.startswith(("etcd ", "nats-server "))]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_doctor_gets_each_workers_gpus_and_flags() -> None:
    on_two_lines = "--max-seq-len 4096\n--max-batch-size 8"
    lines = dry_run("gpt_oss_disagg.sh", NUM_DECODE="2", DECODE_EXTRA_FLAGS=on_two_lines)

    (doctor,) = (shlex.split(line) for line in lines if " -m baton doctor " in line)
    assert doctor[doctor.index("--decode-gpus") + 1] == "4,5;6,7"
    (flags,) = (word for word in doctor if word.startswith("--decode-flags="))
    for worker in (line for line in lines if "--disaggregation-mode decode" in line):
        assert worker.removesuffix(" &").endswith(flags.removeprefix("--decode-flags="))
        assert worker.removesuffix(" &").endswith("--max-seq-len 4096 --max-batch-size 8")


def test_flags_of_vllms_workers_replace_the_default_ones_or_are_added() -> None:
    _, flags = worker(dry_run("gpt_oss_vllm.sh", "--agg", FLAGS="", EXTRA_FLAGS="--max-seq-len 4096"))
    assert (flags["--max-seq-len"], "--tensor-parallel-size" in flags) == ("4096", False)
    lines = dry_run(
        "gpt_oss_vllm.sh", PREFILL_EXTRA_FLAGS="--max-seq-len 4096", DECODE_FLAGS="--drain-timeout-s 9"
    )
    prefill, decode = (line.removesuffix(" &") for line in lines if " -m workers " in line)
    assert prefill.endswith(" prefill --tensor-parallel-size 1 --max-seq-len 4096")
    assert decode.endswith(" decode --drain-timeout-s 9")


@pytest.mark.parametrize("arguments", [["20b"], ["--agg"]])
def test_the_doctor_is_told_the_yamls_of_vllms_workers(arguments: list[str]) -> None:
    lines = dry_run("gpt_oss_vllm.sh", *arguments)

    (doctor,) = (shlex.split(line) for line in lines if " -m baton doctor " in line)
    yamls = [doctor[i + 1] for i, word in enumerate(doctor) if word.endswith("engine-args")]
    workers = [shlex.split(line) for line in lines if " -m workers " in line]
    assert yamls == [line[line.index("--extra-engine-args") + 1] for line in workers]


def test_a_dry_run_can_be_pasted_whatever_the_paths() -> None:
    path = '/my it\'s "$HOME" `x` \\ model;s'
    _, flags = worker(dry_run("gpt_oss_agg.sh", MODEL_PATH=path))
    assert flags["--model-path"] == path


@pytest.mark.parametrize("number", ["3", "0", "-1", "two"])
def test_gpus_that_cannot_be_shared_out_are_refused(run: Run, number: str) -> None:
    launch = run("gpt_oss_disagg.sh --dry-run", {}, NUM_PREFILL=number)
    assert launch.end() == (1, f"error: 4 GPUs (0,1,2,3) cannot be divided evenly among {number} workers\n")


@pytest.mark.parametrize(
    ("profile", "num_gpus", "served"),
    [
        # TensorRT-LLM's blog: trtllm-serve flags of 1, 8 and 4 GPUs, low latency and max throughput.
        *(("low-latency", n, {"fraction": 0.75}) for n in (1, 8, 4)),
        *(("h200-low-latency", n, {"fraction": 0.75}) for n in (1, 8, 4)),
        *(("max-throughput-640", n, {"fraction": 0.9, "max_batch_size": 640}) for n in (1, 8, 4)),
        *(("h200-max-throughput", n, {"fraction": 0.9, "max_batch_size": 640}) for n in (1, 8, 4)),
        # TensorRT-LLM's quick start recipe.
        ("low-latency-720", 8, {"fraction": 0.9, "max_batch_size": 720, "max_num_tokens": 16384}),
        ("max-throughput", 8, {"fraction": 0.9, "max_batch_size": 720, "max_num_tokens": 16384}),
        *(("eval-dep-low", n, {"max_batch_size": 128, "max_num_tokens": 32768}) for n in (8, 4)),
        *(("eval-dep-high", n, {"max_batch_size": 2, "max_num_tokens": 133120}) for n in (8, 4)),
        *(("eval-tp-low", n, {"max_batch_size": 1024, "max_num_tokens": 32768}) for n in (8, 4)),
        *(("eval-tp-high", n, {"max_batch_size": 720, "max_num_tokens": 133120}) for n in (8, 4)),
        ("spark", None, {"fraction": 0.9, "max_batch_size": 64, "max_num_tokens": 8192}),
    ],
)
def test_an_aggregated_profile_serves_with_the_guides_values(
    profile: str, num_gpus: int | None, served: dict[str, object]
) -> None:
    environ = {} if num_gpus is None else {"NUM_GPUS": str(num_gpus)}
    gpus, flags = worker(dry_run("gpt_oss_agg.sh", profile, **environ))

    size = str(num_gpus or 1)
    assert gpus == ",".join(map(str, range(int(size))))
    assert flags["--tensor-parallel-size"] == flags["--expert-parallel-size"] == size
    assert flags["--disaggregation-mode"] == "agg"
    config = yaml.safe_load((ROOT / flags["--extra-engine-args"]).read_text())
    config["fraction"] = config["kv_cache_config"]["free_gpu_memory_fraction"]
    assert served.items() <= config.items()


def test_an_unknown_profile_gets_a_list_of_the_known_ones(run: Run) -> None:
    status, output = run("gpt_oss_agg.sh h100", {}).end()

    assert status == 2
    for path in (ROOT / "engine_configs/gpt-oss-120b").glob("agg_*.yaml"):
        assert path.stem.removeprefix("agg_").replace("_", "-") in output


def test_the_20b_runs_on_one_gpu_or_on_two() -> None:
    gpus, flags = worker(dry_run("gpt_oss_20b.sh"))
    assert (gpus, flags["--extra-engine-args"]) == ("0", "engine_configs/gpt-oss-20b/agg.yaml")
    assert flags["--served-model-name"] == "openai/gpt-oss-20b"

    lines = [line for line in dry_run("gpt_oss_20b.sh", "--disagg") if " -m workers " in line]
    assert [line.split()[0] for line in lines] == ["CUDA_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"]
    assert "engine_configs/gpt-oss-20b/prefill.yaml" in lines[0]
    assert "engine_configs/gpt-oss-20b/decode.yaml" in lines[1]
