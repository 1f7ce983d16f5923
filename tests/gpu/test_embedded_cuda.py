"""The demo model through the embedded engine: prefill and decode on GPUs answer as on the CPU."""

import json
from pathlib import Path

import httpx
import pytest

from tests.gpu.vllm_scene import gpus
from tests.stack import MODEL, ROOT, Stack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

QUESTIONS = ["What is the weather in Paris?", "Say hello to Ada.", "How warm is it in Oslo, and in Rome?"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _answers(folder: Path, device: str) -> list[str]:
    """Greedy chat answers, in float32, as JSON text of their messages."""
    folder.mkdir()
    stack = Stack(folder)
    last = len(gpus()) - 1
    try:
        stack.frontend()
        for mode, gpu in (("prefill", 0), ("decode", last)):
            stack.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
            override = json.dumps({"device": device, "dtype": "float32"})
            arguments = ["--model-path", "models/demo", "--served-model-name", MODEL]
            arguments += ["--disaggregation-mode", mode, "--override-engine-args", override]
            stack.start(
                mode, "workers", *arguments,
                "--extra-engine-args", str(ROOT / f"engine_configs/demo/{mode}.yaml"),
            )  # fmt: skip
        stack.wait_ready(1, 1, 120)
        return [_answer(stack, question) for question in QUESTIONS]
    finally:
        stack.stop()


def _answer(stack: Stack, question: str) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "tools": [TOOL],
        "temperature": 0,
        "seed": 1,
        "max_tokens": 200,
    }
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
    message = response.raise_for_status().json()["choices"][0]["message"]
    for call in message.get("tool_calls") or []:
        call.pop("id")
    return json.dumps(message)


def test_cuda_answers_equal_the_cpus(tmp_path: Path) -> None:
    assert _answers(tmp_path / "cuda", "cuda") == _answers(tmp_path / "cpu", "cpu")
