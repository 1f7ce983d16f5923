"""The demo model through real processes: the guide's conversation, and disaggregated == aggregated."""

import json
import secrets
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from tests.stack import MODEL, Stack, cluster, running_stack
from tests.waiting import PATIENCE_S

HEALTH_TOOL = {
    "type": "function",
    "function": {
        "name": "get_system_health",
        "description": "Returns the current health status of the LLM runtime—use before critical operations "
        "to verify the service is live.",
        "parameters": {"type": "object", "properties": {}},
    },
}
QUESTION = {"role": "user", "content": "Hey, quick check: is everything up and running?"}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": "call-1", "type": "function", "function": {"name": "get_system_health", "arguments": "{}"}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": '{"status":"ok","uptime_seconds":372045}'}
GUIDE = {
    "model": MODEL,
    "chat_template_args": {"reasoning_effort": "low"},
    "tools": [HEALTH_TOOL],
    "response_format": {"type": "text"},
    "max_tokens": 300,
    "temperature": 0,
}

Json = dict[str, Any]


@pytest.fixture(
    scope="module", params=["tcp and files", pytest.param("nats and etcd", marks=pytest.mark.slow)]
)
def stack(
    request: pytest.FixtureRequest, stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """One prefill and one decode worker."""
    if request.param == "tcp and files":
        yield stack
        return
    etcd = request.getfixturevalue("launch_etcd")().url
    environ = cluster(etcd, request.getfixturevalue("nats_server"))
    with running_stack(tmp_path_factory.mktemp("stack"), environ=environ) as other:
        yield other


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One aggregated worker."""
    with Stack(tmp_path_factory.mktemp("aggregated")) as stack:
        stack.serve("agg", engine="embedded")
        yield stack


def chat(stack: Stack, **body: Any) -> Json:
    return stack.answer("/v1/chat/completions", **body)


def streamed(stack: Stack, **body: Any) -> Json:
    """The message that a stream adds up to, with its finish reason."""
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    with httpx.stream(
        "POST", f"{stack.url}/v1/chat/completions", json=body | {"stream": True}, timeout=PATIENCE_S
    ) as r:
        events = [line[6:] for line in r.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call["function"])
            else:
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def test_the_guides_first_round_reasons_and_calls_the_tool(stack: Stack) -> None:
    (choice,) = chat(stack, messages=[QUESTION], **GUIDE)["choices"]

    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] != ""
    assert call["function"] == {"name": "get_system_health", "arguments": "{}"}
    assert streamed(stack, messages=[QUESTION], **GUIDE) == {
        "content": "",
        "reasoning_content": choice["message"]["reasoning_content"],
        "tool_calls": [call["function"]],
        "finish_reason": "tool_calls",
    }


def test_the_guides_second_round_answers_with_the_tools_result(stack: Stack) -> None:
    (choice,) = chat(stack, messages=[QUESTION, CALL, RESULT], **GUIDE)["choices"]

    assert choice["finish_reason"] == "stop"
    assert "372045" in choice["message"]["content"]
    assert choice["message"]["reasoning_content"]
    assert "tool_calls" not in choice["message"]
    whole = streamed(stack, messages=[QUESTION, CALL, RESULT], **GUIDE)
    assert (whole["content"], whole["finish_reason"]) == (choice["message"]["content"], "stop")


SAMPLINGS: list[Json] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    {"temperature": 1, "seed": 9, "frequency_penalty": 0.5, "presence_penalty": 0.5, "n": 3},
    {"temperature": 1, "seed": 10, "repetition_penalty": 1.2, "logit_bias": {"100": -100}, "min_tokens": 20},
]
PROMPTS: list[Json] = [
    {"messages": [QUESTION], "tools": [HEALTH_TOOL]},
    {"messages": [QUESTION, CALL, RESULT], "tools": [HEALTH_TOOL]},
    {"messages": [{"role": "user", "content": "Tell me about " + "the weather in Lisbon, and " * 120}]},
]


def _pairs() -> Iterator[object]:
    """Every prompt with every sampling; fast ones: each greedy, the longest with `n` too."""
    names = ["call", "answer", "longer than chunk and window"]
    for (name, prompt), (number, sampling) in product(zip(names, PROMPTS, strict=True), enumerate(SAMPLINGS)):
        is_slow = number in (1, 2, 4) or (number > 0 and prompt is not PROMPTS[-1])
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(prompt, sampling, id=f"{name}-sampling{number}", marks=marks)


@pytest.mark.parametrize(("prompt", "sampling"), list(_pairs()))
def test_disaggregated_is_aggregated_token_for_token(
    stack: Stack, aggregated: Stack, prompt: Json, sampling: Json
) -> None:
    body = {"model": MODEL, "max_tokens": 60, "logprobs": True, **prompt, **sampling}
    body["cache_salt"] = secrets.token_hex(4)  # both compute the whole prompt

    one, other = chat(stack, **body), chat(aggregated, **body)

    assert one["usage"] == other["usage"]
    assert _tokens(one) == _tokens(other)
    assert stack.gauge("baton_handoffs_total") > 0
    assert stack.spent("baton_stage_seconds", 'stage="kv_move"')[1] > 0
    assert aggregated.gauge("baton_handoffs_total") == 0
    assert aggregated.spent("baton_stage_seconds", 'stage="kv_move"') == (0, 0)


def _tokens(answer: Json) -> list[Json]:
    """The generated content: call ids are random, log probabilities are rounded."""
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        tokens = [entry["token"] for entry in (choice["logprobs"] or {}).get("content", ())]
        found.append({**message, "tool_calls": calls, "tokens": tokens, "why": choice["finish_reason"]})
    return found


@pytest.mark.parametrize("when_s", [0.0, 0.02, 0.1, 0.3])
def test_leaving_in_any_phase_frees_everything(stack: Stack, when_s: float) -> None:
    body = {"model": MODEL, "prompt": "again and again " * 300, "max_tokens": 1000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{stack.url}/v1/completions", json=body, timeout=httpx.Timeout(PATIENCE_S, read=when_s or 0.001)
        )

    stack.wait_idle(20)  # before the answer would have ended
