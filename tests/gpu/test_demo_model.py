"""The demo model on GPUs, disaggregated: the embedded engine and vLLM answer as the CPU does."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.gpu.vllm_scene import devices, gpus
from tests.stack import MODEL, ROOT, Stack
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

Json = dict[str, Any]
QUESTIONS = ["What is the weather in Paris?", "Say hello to Ada.", "How warm is it in Oslo, and in Rome?"]
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "n": {"type": "integer", "maximum": 9}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
# In float32 greedy answers are equal for all kernels.
VLLM = {
    "dtype": "float32",
    "attention_backend": "TRITON_ATTN",
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 2_000_000_000,
}


LONG = {"type": "array", "items": {"enum": [7, 42, 365]}, "minItems": 300, "maxItems": 300}


@contextmanager
def _running(
    folder: Path, engine: str, override: Json, modes: tuple[str, str] = ("prefill", "decode")
) -> Iterator[Stack]:
    """The demo model, one worker on the first GPU and one on the last."""
    stack, last = Stack(folder), len(gpus()) - 1
    try:
        stack.frontend()
        for mode, gpu in zip(modes, (0, last), strict=True):
            stack.environ["CUDA_VISIBLE_DEVICES"] = devices(gpu, 1)
            arguments = ["--engine", engine, "--model-path", "models/demo", "--served-model-name", MODEL]
            arguments += ["--disaggregation-mode", mode, "--override-engine-args", json.dumps(override)]
            if engine == "embedded":
                arguments += ["--extra-engine-args", str(ROOT / f"engine_configs/demo/{mode}.yaml")]
            stack.start(mode, "workers", *arguments)
        stack.wait_ready(modes.count("prefill"), 2 - modes.count("prefill"), 600)
        yield stack
    finally:
        stack.stop()


def _ask(stack: Stack, question: str, **options: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "tools": [TOOL], "seed": 1}
    body |= {"temperature": 0, "max_tokens": 200} | options
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)


def _message(stack: Stack, question: str, **options: Any) -> Json:
    response = _ask(stack, question, **options)
    assert response.status_code == 200, response.text
    message: Json = response.json()["choices"][0]["message"]
    for call in message.get("tool_calls") or []:
        call.pop("id")
    return message


def _embedded(folder: Path, device: str) -> list[Json]:
    with _running(folder, "embedded", {"device": device, "dtype": "float32"}) as stack:
        return [_message(stack, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    return _embedded(tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with _running(tmp_path_factory.mktemp("vllm"), "vllm", VLLM) as stack:
        yield stack


def test_the_embedded_engine_answers_on_cuda_as_on_the_cpu(tmp_path: Path, on_the_cpu: list[Json]) -> None:
    assert _embedded(tmp_path, "cuda") == on_the_cpu


def test_vllm_answers_as_the_embedded_engine_on_the_cpu(vllm: Stack, on_the_cpu: list[Json]) -> None:
    assert [_message(vllm, question) for question in QUESTIONS] == on_the_cpu


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_vllm_makes_a_demanded_call(vllm: Stack, question: str, choice: str | Json) -> None:
    (call,) = _message(vllm, question, tool_choice=choice)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])


@pytest.mark.parametrize("question", QUESTIONS)
def test_vllm_keeps_to_a_schema(vllm: Stack, question: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    message = _message(vllm, question, response_format=form, max_tokens=1000, tools=[])
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({"n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 20}, 2),
        ({"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.2, "min_tokens": 90}, 90),
        ({"stop": ["zzz"], "logit_bias": {"55": -100}, "top_k": 5, "min_p": 0.1, "temperature": 0.7}, 1),
        ({"priority": -3, "ignore_eos": True, "max_tokens": 120}, 120),
        ({"tool_choice": "required", "min_tokens": 50, "n": 2, "temperature": 1}, 2),
    ],
)
def test_vllm_takes_every_field_of_sampling(vllm: Stack, options: Json, num_tokens: int) -> None:
    response = _ask(vllm, "Say hello to Ada.", **options)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert len(answer["choices"]) == options.get("n", 1)
    assert answer["usage"]["completion_tokens"] >= num_tokens
    for token in answer["choices"][0]["logprobs"]["content"] if "logprobs" in options else ():
        assert len(token["top_logprobs"]) == 20


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1}], ids=["greedy", "seeded"])
def test_answers_of_a_form_outlive_vllms_worker(tmp_path: Path, sampling: Json) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": LONG}}
    asked: Json = {"response_format": form, "max_tokens": 2000, "tools": [], **sampling}
    with _running(tmp_path, "vllm", VLLM, ("agg", "agg")) as stack, ThreadPoolExecutor(4) as pool:
        expected = _message(stack, QUESTIONS[0], **asked)
        jsonschema.validate(json.loads(expected["content"]), LONG)
        answers = [pool.submit(_message, stack, QUESTIONS[0], **asked) for _ in range(4)]
        wait_for(lambda: stack.gauge("baton_worker_running_requests") >= 4)
        generated = stack.gauge("baton_worker_generated_tokens_total")
        wait_for(lambda: stack.gauge("baton_worker_generated_tokens_total") > generated + 100)
        stack.processes[1].popen.kill()
        assert [answer.result() for answer in answers] == [expected] * 4
        assert "reason=not_resumable" in stack.processes[0].text()


def test_vllm_holds_nothing_when_all_is_answered(vllm: Stack) -> None:
    vllm.wait_idle(30)
