"""AIPerf on two GPUs: prefill and decode apart, two aggregated workers, and `vllm serve` twice.

`python benchmarks/vllm_aiperf.py [--size 20b] [--aiperf COMMAND] [--ways apart,aggregated,vllm]` runs each in
turn, with random weights, which are as fast as real ones, and adds the results to
benchmarks/results/vllm_aiperf_20b.json. It uses /v1/completions, since `vllm serve` fails on random tokens in
chat. Needs etcd and nats-server on the PATH, and the vocabulary of `make vocab`."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from tests.conftest import free_port
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import devices, gpus
from tools.fetch_vocab import vocabulary_folder

ROOT = Path(__file__).parents[1]
MODEL = "openai/gpt-oss"
ENGINE = {
    "load_format": "dummy",
    "enable_prefix_caching": False,
    "max_model_len": 40960,
}
ENGINES: dict[str, dict[str, Any]] = dict.fromkeys(
    ("PREFILL_EXTRA_FLAGS", "DECODE_EXTRA_FLAGS", "EXTRA_FLAGS"), ENGINE
)
# input tokens, output tokens, concurrency, requests
WORKLOADS = [(1024, 1024, 64, 128), (32_000, 256, 8, 24)]
WAYS = ("apart", "aggregated", "vllm")
NUM_GPUS = 2
LOAD_TIMEOUT_S = 400


@contextmanager
def baton(
    folder: Path, size: str, *arguments: str, engines: dict[str, dict[str, Any]] = ENGINES
) -> Iterator[tuple[list[str], str]]:
    """`launch/gpt_oss_vllm.sh`, ready: its URL and its command. `engines`: arguments by the variable of the
    role."""
    port = free_port()
    variables = {
        "MODEL_PATH": str(folder),
        "SERVED_MODEL_NAME": MODEL,
        "HTTP_PORT": str(port),
        "PYTHON": sys.executable,
        "SKIP_DOCTOR": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NUM_AGG": "2",
        **{role: f"--override-engine-args {_json(engine)}" for role, engine in engines.items()},
    }
    command = ["launch/gpt_oss_vllm.sh", size, *arguments]
    with running(command, variables) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready:"):
                break
            sys.stderr.write(line)
        else:
            raise RuntimeError(f"{command} did not become ready")
        threading.Thread(target=sys.stderr.writelines, args=[process.stdout], daemon=True).start()
        yield [f"http://127.0.0.1:{port}"], _typed(variables, command)


@contextmanager
def vllm_serve(
    folder: Path, *, prefix_caching: bool = False, step: int = 8192
) -> Iterator[tuple[list[str], str]]:
    """vLLM's own server on each GPU, ready: their URLs and the command."""
    urls, processes, typed = [], [], []
    with ExitStack() as servers:
        for gpu in range(NUM_GPUS):
            port = free_port()
            urls.append(f"http://127.0.0.1:{port}")
            command = (
                f"python -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name {MODEL} "
                f"--port {port} --load-format dummy --max-model-len 40960 "
                f"--{'' if prefix_caching else 'no-'}enable-prefix-caching "
                f"--max-num-seqs 256 --max-num-batched-tokens {step} --gpu-memory-utilization 0.9"
            )
            variables = {
                "CUDA_VISIBLE_DEVICES": devices(gpu, 1),
                "TIKTOKEN_ENCODINGS_BASE": str(vocabulary_folder()),
            }
            typed.append(_typed(variables, command.split()))
            log = servers.enter_context(tempfile.TemporaryFile("w+"))
            processes.append((servers.enter_context(running(command.split(), variables, log)), log))
        for url, (process, log) in zip(urls, processes, strict=True):
            wait_for(f"{url}/health", process, log)
        yield urls, "; ".join(typed)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _typed(variables: dict[str, str], command: list[str]) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *command])


@contextmanager
def running(
    command: list[str], variables: dict[str, str], out: IO[str] | int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Run the command in its own process group and stop it at the end; its output goes to `out`."""
    command = [sys.executable if word == "python" else word for word in command]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, process: "subprocess.Popen[str]", log: IO[str]) -> None:
    """Until the server answers there. Raises RuntimeError with the end of its log."""
    give_up = time.monotonic() + LOAD_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)  # it sends no signal when it has loaded
    log.seek(0)
    raise RuntimeError(f"{url} did not answer:\n{log.read()[-4000:]}")


def measure(aiperf: str, urls: list[str], folder: Path, workload: tuple[int, ...]) -> dict[str, Any]:
    """One AIPerf run: its command and figures."""
    num_in, num_out, concurrency, num_requests = workload
    with tempfile.TemporaryDirectory() as artifacts:
        command = (
            f"{aiperf} profile --model {MODEL} --tokenizer {folder} --endpoint-type completions --streaming "
            f"--synthetic-input-tokens-mean {num_in} --synthetic-input-tokens-stddev 0 "
            f"--output-tokens-mean {num_out} --output-tokens-stddev 0 --extra-inputs max_tokens:{num_out} "
            f"--extra-inputs min_tokens:{num_out} --extra-inputs ignore_eos:true --use-server-token-count "
            f"--concurrency {concurrency} --request-count {num_requests} "
            f"--warmup-request-count {concurrency} --num-dataset-entries 64 --random-seed 100 --ui none "
            + " ".join(f"--url {url}" for url in urls)
        )
        run = subprocess.run(
            [*shlex.split(command), "--artifact-dir", artifacts],
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
            # Offline, AIPerf looks for the tokenizer's folder only in its cache.
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        )
        found = Path(artifacts) / "profile_export_aiperf.json"
        if run.returncode or not found.is_file():
            return {"command": command, "failed": (run.stdout + run.stderr)[-2000:]}
        return {"command": command, **_figures(json.loads(found.read_text()))}


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    tokens_per_s = found["output_token_throughput"]["avg"]
    return {
        "requests": found["request_count"]["avg"],
        "errors": found["error_summary"],
        "ttft_ms": {name: round(found["time_to_first_token"][name], 1) for name in ("avg", "p50", "p99")},
        "itl_ms": {name: round(found["inter_token_latency"][name], 2) for name in ("avg", "p50", "p99")},
        "request_s": round(found["request_latency"]["avg"] / 1000, 2),
        "output_tokens_per_s": round(tokens_per_s),
        "output_tokens_per_s_per_gpu": round(tokens_per_s / NUM_GPUS),
    }


def main() -> None:
    """Measure all set-ups in turn; each result is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="20b", choices=["20b", "120b"])
    parser.add_argument("--aiperf", default="aiperf", help="command that starts AIPerf")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    file = options.results / f"vllm_aiperf_{options.size}.json"
    results: dict[str, Any] = {
        **(json.loads(file.read_text()) if file.is_file() else {}),
        "hardware": gpus()[:NUM_GPUS],
        "model": f"gpt-oss-{options.size}, random weights",
        "engine": ENGINE,
        "versions": {name: version(name) for name in ("torch", "vllm", "nixl-cu13")},
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_dummy_model(Path(scratch) / f"gpt-oss-{options.size}", options.size)
        plugin = random_weights.install(Path(scratch) / "plugin")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        started = {
            "apart": lambda: baton(folder, options.size),
            "aggregated": lambda: baton(folder, options.size, "--agg"),
            "vllm": lambda: vllm_serve(folder),
        }
        for way in options.ways.split(","):
            with started[way]() as (urls, command):
                runs = results[way] = {"command": command}
                for workload in WORKLOADS:
                    name = f"{workload[0]} in, {workload[1]} out, {workload[2]} at a time"
                    runs[name] = measure(options.aiperf, urls, folder, workload)
                    sys.stdout.write(f"{way}: {name}: {json.dumps(runs[name])}\n")
                    sys.stdout.flush()
                    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
