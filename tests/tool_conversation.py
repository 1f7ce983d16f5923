"""A conversation of tool rounds over the chat API, with what each round cost the workers."""

import json
import time
from typing import Any

import httpx
import msgspec

from tests.stack import MODEL, Stack

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_COUNTERS = ("num_prompt_tokens", "kv_moved_bytes", "num_handoffs")


class Round(msgspec.Struct, frozen=True):
    """One request: its prompt, the part of it that is neither the last prompt nor its answer, and what all
    workers together did for it. Handoffs count on both sides.
    """

    num_prompt_tokens: int
    num_new_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    moved_bytes: int
    num_handoffs: int
    ttft_s: float
    answer: dict[str, Any]


def converse(stack: Stack, num_rounds: int, *, city: str, result_words: int = 40) -> list[Round]:
    """Ask for one call after another and answer each with a result of about that many words."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Compare the weather in {city} for me."}]
    rounds: list[Round] = []
    num_known = 0
    with httpx.Client(base_url=stack.url, timeout=300) as client:
        for number in range(num_rounds):
            before = _counted(stack)
            began = time.perf_counter()
            message, usage, first_at = _ask(client, messages)
            spent = {name: round(now - before[name]) for name, now in _counted(stack).items()}
            rounds.append(
                Round(
                    num_prompt_tokens=usage["prompt_tokens"],
                    num_new_tokens=usage["prompt_tokens"] - num_known,
                    num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                    num_computed_tokens=spent["num_prompt_tokens"],
                    moved_bytes=spent["kv_moved_bytes"] // 2,
                    num_handoffs=spent["num_handoffs"],
                    ttft_s=first_at - began,
                    answer=message,
                )
            )
            num_known = usage["prompt_tokens"] + usage["completion_tokens"]
            result = " ".join(f"{city} {number} {word}" for word in range(result_words // 3))
            call_id = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call_id, "content": result}]
    return rounds


def told(rounds: list[Round]) -> list[Any]:
    """The calls of each round, without their ids."""
    return [[call["function"] for call in each.answer["tool_calls"]] for each in rounds]


def _ask(
    client: httpx.Client, messages: list[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """(the message as a client sends it back, usage, when the first event came)."""
    body = {
        "model": MODEL,
        "messages": messages,
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
    }
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    first_at = 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            first_at = first_at or time.perf_counter()
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                for part in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(
                        part["index"], {"type": "function", "function": {"arguments": ""}}
                    )
                    call["id"] = part.get("id") or call["id"]
                    function = part["function"]
                    call["function"]["name"] = function.get("name") or call["function"]["name"]
                    call["function"]["arguments"] += function.get("arguments") or ""
    return {"role": "assistant", "tool_calls": [calls[i] for i in sorted(calls)]}, usage, first_at


def _counted(stack: Stack) -> dict[str, float]:
    stack.wait_idle(60)
    return {name: stack.gauge(f"baton_{name}") for name in _COUNTERS}
