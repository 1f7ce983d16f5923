"""Answers of Baton's workers through Dynamo's frontend, and through Baton's over the same plane."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.dynamo.behind import Behind
from tests.stack import MODEL
from tests.waiting import PATIENCE_S

CONTEXT = 600
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
pytestmark = pytest.mark.dynamo
PROMPTS = ["Hi there", "The answer is", "Once upon a time " * 20]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """Prefill and decode with the demo model."""
    with Behind(tmp_path_factory.mktemp("behind")) as stack:
        stack.behind("prefill", "decode", engine="embedded", max_seq_len=CONTEXT)
        yield stack


@pytest.fixture(scope="module")
def batons(stack: Behind) -> str:
    """Baton's frontend beside Dynamo's, over the same workers: its URL."""
    return stack.another_frontend()[1]


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}{path}", json={"model": MODEL, "temperature": 0} | body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_both_frontends_get_the_same_text_of_the_same_workers(stack: Behind, batons: str) -> None:
    for prompt in PROMPTS:
        texts = [
            ask(url, "/v1/completions", prompt=prompt, max_tokens=24)["choices"][0]["text"]
            for url in (stack.url, batons)
        ]
        assert texts[0] == texts[1] != ""


def test_kv_moves_from_prefill_to_decode_and_is_freed(stack: Behind) -> None:
    prefill, decode = (each for each in stack.processes if each.name in stack.ports)
    moved, computed = stack.figure(decode, "kv_moved_bytes"), stack.figure(decode, "num_prompt_tokens")
    answer = stack.chat("Tell me of the sea. " * 10, max_tokens=8).json()
    assert stack.figure(decode, "kv_moved_bytes") > moved
    assert stack.figure(decode, "num_prompt_tokens") == computed  # prefill computed all
    assert answer["usage"]["completion_tokens"] == 8
    stack.wait_idle_workers(prefill, decode)


def test_a_chat_answer_ends_with_its_stop_token_and_has_log_probabilities(stack: Behind) -> None:
    body = {"max_tokens": 120, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = stack.chat("What is the capital of France?", **body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "Paris" in choice["message"]["content"]
    entries = choice["logprobs"]["content"]
    assert len(entries) in (answer["usage"]["completion_tokens"], answer["usage"]["completion_tokens"] - 1)
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)


def test_a_stream_is_the_whole_answer_in_parts(stack: Behind) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    text, usage = "", None
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
        for line in reply.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            text += "".join(choice["text"] for choice in event.get("choices", ()))
            usage = event.get("usage") or usage
    whole = ask(stack.url, "/v1/completions", prompt=PROMPTS[0], max_tokens=24)
    assert text == whole["choices"][0]["text"]
    assert usage is not None
    assert usage["completion_tokens"] == 24


def test_a_repeated_prompt_is_found_in_the_cache_unless_its_salt_differs(stack: Behind) -> None:
    def num_cached(**body: Any) -> int:
        usage = stack.chat("A long and repeated prompt. " * 8, max_tokens=2, **body).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert num_cached() < 32
    assert num_cached() > 32
    assert num_cached(nvext={"cache_salt": "other"}) < 32


def test_a_demanded_form_holds_and_sampling_repeats_with_its_seed(stack: Behind) -> None:
    answer = stack.chat("How many?", max_tokens=300, temperature=0, guided_regex="[0-9]{3}x").json()
    assert re.fullmatch("[0-9]{3}x", answer["choices"][0]["message"]["content"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    sampled = {"prompt": "tell", "max_tokens": 16, "temperature": 1.5, "seed": 7}
    first, second = (stack.answer("/v1/completions", **sampled)["choices"][0]["text"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [5] * CONTEXT, "max_tokens": 2}, f"context length of {CONTEXT}"),
        ({"prompt": "Hi", "max_tokens": 2, "n": 2}, "sampling_options.n"),
        ({"prompt": "Hi", "max_tokens": 2, "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt": [1, 2, 3072], "max_tokens": 2}, ""),
    ],
)
def test_a_request_that_is_not_served_gets_the_reason(
    stack: Behind, body: dict[str, Any], reason: str
) -> None:
    refused = stack.post("/v1/completions", **body)
    assert refused.status_code == 400
    assert reason in refused.text
    assert "Traceback" not in refused.text


def test_an_answer_that_fills_the_context_ends_with_length(stack: Behind) -> None:
    for num_left in (1, 2):
        answer = stack.answer("/v1/completions", prompt=[5] * (CONTEXT - num_left), max_tokens=9)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == num_left


def test_batons_frontend_over_dynamo_gets_calls_forms_and_reasoning(batons: str) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = ask(batons, "/v1/chat/completions", messages=question, tools=[WEATHER], tool_choice="required")[
        "choices"
    ][0]
    assert called["finish_reason"] == "tool_calls"
    call = called["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    assert isinstance(json.loads(call["arguments"])["city"], str)
    answer = ask(batons, "/v1/responses", input="What is the capital of France?", max_output_tokens=200)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert "Paris" in answer["output"][1]["content"][0]["text"]
