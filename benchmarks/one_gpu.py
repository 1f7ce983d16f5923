"""One GPU: agents' turns, and running answers beside long prompts, with prefill and decode apart or not.

`python benchmarks/one_gpu.py [--ways mps60,agg] [--frontends FLAGS;FLAGS] [--no-start-after-s 480]` starts
each way in turn and adds its figures to one_gpu_20b.json in `--results`. Weights are random. Ways:

    agg, agg512          an aggregated worker; with steps of 512 tokens
    vllm, vllm512        `vllm serve`
    slices               prefill and decode apart, without MPS
    mps60                under MPS, prefill on at most 60 % of the SMs, its kernels equal to decode's
    mps100-below         prefill's kernels come after decode's
    mps80-below@2048     the same on at most 80 % of the SMs; its steps have at most 2,048 tokens
    mps100-below+32      decode's CUDA graphs are for at most 32 tokens

`--frontends`: sets of frontend flags that are tried over the first way's workers. Several runs go on beside
each other on one host, with `CUDA_VISIBLE_DEVICES` of one GPU, `--port-base` and `--results` of their own:
registry, run folder and MPS are each run's own. Needs what `vllm_aiperf.py` needs, without AIPerf, etcd and
NATS."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import agent_turns, handoff_stall
from benchmarks import vllm_aiperf as servers
from tests.conftest import free_port
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import gpus

ROOT = Path(__file__).parents[1]
LOAD = {"system": 2000, "first": 6000, "more": 800, "answer": 100, "turns": 8, "conversations": 24}
LONG_PROMPTS = {0: 3.0, 12_000: 5.0, 32_000: 6.0}  # tokens, and the seconds of each row
ENGINE: dict[str, Any] = {"load_format": "dummy", "max_model_len": 40960}
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)  # of decode, where a way limits them
_NAME = re.compile(r"(agg|vllm|slices|mps)((?:(?<!slices)\d+)?)((?<=\d)-below)?(?:@(\d+))?(?:\+(\d+))?")
_LOGGED = re.compile(r"(one GPU: |Model loading took |GPU KV cache size: |Graph capturing ).*")


def command_of(way: str) -> tuple[list[str], dict[str, str]]:
    """The launch script's arguments and variables."""
    found = _NAME.fullmatch(way)
    assert found is not None
    kind, number, below, step, graph = found.groups()
    sizes = {"PREFILL": step, "DECODE": None, "": number if kind == "agg" else None}
    graphs = [size for size in GRAPHS if size <= int(graph or 0)]
    variables = {}
    for role, size in sizes.items():
        engine = ENGINE | ({"cudagraph_capture_sizes": graphs} if graphs and role == "DECODE" else {})
        flags = f"--override-engine-args {json.dumps(engine, separators=(',', ':'))}"
        variables[f"{role}_EXTRA_FLAGS".lstrip("_")] = flags + (f" --max-num-tokens {size}" if size else "")
    variables |= {"NO_MPS": "1"} if kind == "slices" else {}
    variables |= {"PREFILL_MPS_PRIORITY": str(int(bool(below)))} if kind == "mps" else {}
    share = ["--prefill-sm-share", number] if kind == "mps" else []
    return ["20b", *(["--agg"] if kind == "agg" else ["--one-gpu", *share])], variables


@contextlib.contextmanager
def baton(folder: Path, way: str, port: int) -> Iterator[tuple[str, str, list[str]]]:
    """The launch script, ready: its URL, its command, and what it has printed so far."""
    arguments, more = command_of(way)
    variables = {"MODEL_PATH": str(folder), "SERVED_MODEL_NAME": servers.MODEL, "HTTP_PORT": str(port)}
    variables |= {"PYTHON": sys.executable, "SKIP_DOCTOR": "1", "RESTART_WORKERS": ""}
    variables |= more
    command = ["launch/gpt_oss_vllm.sh", *arguments]
    with servers.running(command, variables) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready:") or (way.startswith("mps") and "time slices" in line):
                break
        if not lines[-1].startswith("ready:"):
            raise RuntimeError("".join(lines[-60:]))
        threading.Thread(target=lines.extend, args=[process.stdout], daemon=True).start()
        typed = [f"{name}='{value}'" for name, value in more.items()]
        yield f"http://127.0.0.1:{port}", " ".join([*typed, *command]), lines


@contextlib.contextmanager
def vllm_serve(folder: Path, step: str) -> Iterator[tuple[str, str, list[str]]]:
    """vLLM's own server: its URL and command."""
    with servers.vllm_serve(folder, prefix_caching=True, step=int(step or 8192)) as ((url,), command):
        yield url, command, []


def turns(url: str, think_s: float, seed: int) -> dict[str, Any]:
    """Agents' conversations."""
    return agent_turns.measured([url], argparse.Namespace(**LOAD, think_s=think_s), seed)


def long_prompts(url: str) -> Iterator[dict[str, Any]]:
    """Running answers, alone and beside one new long prompt at a time."""
    for num_tokens, seconds in LONG_PROMPTS.items():
        row = asyncio.run(handoff_stall.gaps(url, num_tokens, seconds, cached=False))
        yield {name: value for name, value in row.items() if name != "longest_of_each"}


def measured(
    way: str, folder: Path, think_s: float, frontends: list[str], port: int
) -> Iterator[dict[str, Any]]:
    """The way's figures, then those of each set of frontend flags over the same workers."""
    began = time.monotonic()
    started = vllm_serve(folder, way[4:]) if way.startswith("vllm") else baton(folder, way, port)
    with started as (url, command, lines):
        yield {
            "way": way,
            "command": command,
            "load_s": round(time.monotonic() - began, 1),
            "turns": turns(url, think_s, 0),
            "long_prompts": list(long_prompts(url)),
            "gpu_used_mib": used_mib(),
            "logged": [found[0] for line in lines if (found := _LOGGED.search(line))],
        }
        for number, flags in enumerate(frontends, 1):
            with agent_turns.frontend(folder, flags) as other:
                yield {"way": way, "frontend": flags, "turns": turns(other, think_s, 10_000 * number)}


def used_mib() -> int:
    """Memory of the GPU that is in use."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    command = f"nvidia-smi -i {gpu} --query-gpu=memory.used --format=csv,noheader,nounits"
    listed = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    return int(listed.stdout.split()[0])


def main() -> None:
    """Measure the ways in turn; each result is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="mps100-below,mps92-below,slices,agg")
    parser.add_argument("--frontends", default="", help="sets of flags, separated by ;")
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--no-start-after-s", type=float, default=1e9, help="skip the ways that come later")
    parser.add_argument(
        "--port-base", type=int, help="the first way's port, then the next; else any free one"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    ways = options.ways.split(",")
    if unknown := [way for way in ways if not _NAME.fullmatch(way)]:
        parser.error(f"--ways: unknown: {', '.join(unknown)}")
    file = options.results / "one_gpu_20b.json"
    results = json.loads(file.read_text()) if file.is_file() else {"runs": []}
    results |= {
        "hardware": gpus()[:1],
        "versions": {name: version(name) for name in ("torch", "vllm", "nixl-cu13")},
        "model": "gpt-oss-20b, random weights",
        "load": LOAD | {"think_s": options.think_s},
    }
    began, servers.NUM_GPUS = time.monotonic(), 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_dummy_model(Path(scratch) / "gpt-oss-20b", "20b")
        plugin = random_weights.install(Path(scratch) / "plugin")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        os.environ |= {"BATON_DISCOVERY_BACKEND": "file", "BATON_REQUEST_PLANE": "tcp"}
        for number, way in enumerate(ways):
            os.environ["BATON_FILE_REGISTRY"] = f"{scratch}/registry-{number}"
            if time.monotonic() - began > options.no_start_after_s:
                print(f"{way}: not started, no time", flush=True)
                continue
            frontends = options.frontends.split(";") if options.frontends and not number else []
            port = options.port_base + number if options.port_base else free_port()
            try:
                for figures in measured(way, folder, options.think_s, frontends, port):
                    print(json.dumps(figures), flush=True)
                    results["runs"].append(figures)
                    file.write_text(json.dumps(results, indent=1) + "\n")
            except RuntimeError as error:  # the next way may work
                print(f"{way}: {error}", flush=True)
            except KeyboardInterrupt:
                print(f"{way}: stopped", flush=True)
                return


if __name__ == "__main__":
    main()
