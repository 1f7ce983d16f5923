"""vLLM workers with random gpt-oss weights behind a frontend, on half of the GPUs each or both on one."""

import asyncio
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.alive import is_running
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.stack import MODEL, ROOT, Process, Stack
from tests.waiting import wait_for

LOAD_TIMEOUT_S = 900.0  # 104 to 163 s on H200s
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "")
PATIENCE_S = 240.0
# The monitor logs kernels compiled after vLLM has started.
_TEST_ONLY = {"load_format": "dummy", "max_model_len": 40960, "jit_monitor_verbose": True}
# Given, as each of two that load at once would measure the other's memory, too.
_SHARED_GPU = {"gpu_memory_utilization": 0.45, "kv_cache_memory_bytes": 22_000_000_000}


@dataclasses.dataclass(frozen=True)
class Answer:
    """One completion, or the name of its error."""

    tokens: tuple[str, ...] = ()
    error: str | None = None
    total_s: float = 0.0
    num_cached_tokens: int = 0


@dataclasses.dataclass
class Scene:
    """The stack, the answers of each round, and the figures for the results file."""

    stack: Stack
    size: str
    prefill: Process
    decode: Process
    answers: dict[str, list[Answer]] = dataclasses.field(default_factory=dict)
    asked_next: list[list[int]] = dataclasses.field(default_factory=list)
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


def gpus() -> list[str]:
    """Names of the visible GPUs (CUDA_VISIBLE_DEVICES, if set)."""
    asked = ["-i", VISIBLE] if VISIBLE else []
    command = ["nvidia-smi", *asked, "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).splitlines()


def devices(first: int, num: int) -> str:
    """CUDA_VISIBLE_DEVICES of a worker with `num` of `gpus()`, from `first` on."""
    named = VISIBLE.split(",") if VISIBLE else list(map(str, range(first + num)))
    return ",".join(named[first : first + num])


@contextmanager
def vllm_scene(folder: Path, size: str, etcd: str, nats: str) -> Iterator[Scene]:
    """A prefill worker on one half of the GPUs and a decode worker on the other; size is 20b or 120b."""
    planes = {"BATON_DISCOVERY_BACKEND": "etcd", "BATON_REQUEST_PLANE": "nats"}
    plugin = os.pathsep.join(
        [str(random_weights.install(folder / "plugin")), os.environ.get("PYTHONPATH", "")]
    )
    stack = Stack(folder, {**planes, "ETCD_ENDPOINTS": etcd, "NATS_SERVER": nats, "PYTHONPATH": plugin})
    try:
        model = write_dummy_model(folder / f"gpt-oss-{size}", size)
        stack.frontend()
        began = time.monotonic()
        prefill = vllm_worker(stack, "prefill", model, size)
        decode = vllm_worker(stack, "decode", model, size)
        stack.wait_ready(1, 1, LOAD_TIMEOUT_S)
        scene = Scene(stack, size, prefill, decode)
        scene.figures["load_s"] = round(time.monotonic() - began, 1)
        yield scene
    finally:
        stack.stop()
        for process in stack.processes:
            sys.stdout.write(f"--- {process.name}\n{process.text()[-4000:]}\n")  # printed if a test failed


def tensor_parallel_size() -> int:
    """GPUs of each of the two workers."""
    return max(1, len(gpus()) // 2)


def vllm_worker(stack: Stack, mode: str, model: Path, size: str) -> Process:
    """A worker with the YAML of engine_configs; two on one GPU get less than half of it each."""
    num, tp = len(gpus()), tensor_parallel_size()
    override = _TEST_ONLY | (_SHARED_GPU if num == 1 else {})
    override |= json.loads(os.environ.get("BATON_GPU_OVERRIDE", "{}"))
    first = 0 if mode == "prefill" else num - tp
    stack.environ["CUDA_VISIBLE_DEVICES"] = devices(first, tp)
    arguments = ["--engine", "vllm", "--model-path", str(model), "--served-model-name", MODEL]
    arguments += ["--tensor-parallel-size", str(tp)]
    arguments += ["--disaggregation-mode", mode, "--override-engine-args", json.dumps(override)]
    arguments += ["--extra-engine-args", str(ROOT / f"engine_configs/vllm/gpt-oss-{size}/{mode}.yaml")]
    return stack.start(f"{mode}-{size}", "workers", *arguments)


def compiled_late(process: Process) -> dict[str, int]:
    """How often each kernel was compiled after the worker was ready, while clients waited."""
    since_ready = process.text().partition(" ready worker=")[2]
    return dict(Counter(re.findall(r"JIT compilation during inference: ([^\s(]+?)\.?\s", since_ready)))


def prompts(num: int, longest: int, seed: int) -> list[list[int]]:
    """`num` random prompts of 100 to `longest` tokens, including the longest."""
    rng = random.Random(seed)
    lengths = [longest] + [rng.randint(100, longest) for _ in range(num - 1)]
    return [[rng.randrange(1000, 190_000) for _ in range(length)] for length in lengths]


def ask_all(stack: Stack, asked: list[list[int]], concurrency: int, **options: Any) -> list[Answer]:
    """Send all prompts, `concurrency` at a time; answers of 32 greedy tokens unless `options` say
    otherwise."""

    async def main() -> list[Answer]:
        slots = asyncio.Semaphore(concurrency)
        async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(_ask(client, slots, prompt, options) for prompt in asked))

    return asyncio.run(main())


async def _ask(
    client: httpx.AsyncClient, slots: asyncio.Semaphore, prompt: list[int], options: dict[str, Any]
) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": 0, "skip_special_tokens": False, **options}
    async with slots:
        began = time.monotonic()
        response = await client.post("/v1/completions", json=body)
        total_s = time.monotonic() - began
    if response.status_code != 200:
        return Answer(error=response.json()["error"]["code"], total_s=total_s)
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(tuple(choice["logprobs"]["tokens"]), total_s=total_s, num_cached_tokens=num_cached)


async def abandon(stack: Stack, prompt: list[int], after_s: float) -> None:
    """A streamed request whose client disconnects after that time."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S) as client:
        try:
            async with (
                asyncio.timeout(after_s),
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for _ in response.aiter_bytes():
                    pass
        except TimeoutError:
            pass


def descendants(pid: int) -> set[int]:
    """All descendants of a process."""
    children: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            children |= {int(stat.parent.name)} | descendants(int(stat.parent.name))
    return children


def kill_worker(process: Process) -> float:
    """SIGKILL; the seconds until its child processes, which hold the GPU, have ended too."""
    below = descendants(process.popen.pid)
    began = time.monotonic()
    process.kill()
    wait_for(lambda: not any(is_running(pid) for pid in below), 30)
    return time.monotonic() - began
