"""A conversation with a tool over the chat API, with what each request cost the workers."""

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
CITIES = ("Oslo", "Lisbon", "Paris", "Berlin", "Rome")
# Of what both sides of a handoff count, decode's: prefill misses a pull whose first token closes its call.
_COUNTED_OF = {"worker_prompt_tokens": "", "kv_moved_bytes": "decode", "handoffs": "decode"}


class Turn(msgspec.Struct, frozen=True):
    """One request: its prompt, the part of it that does not repeat the last prompt and its answer, and what
    all workers together did for it."""

    num_prompt_tokens: int
    num_new_tokens: int
    num_computed_tokens: int
    moved_bytes: int
    num_handoffs: int
    ttft_s: float
    answer: dict[str, Any]


def converse(stack: Stack, num_turns: int, *, salt: str | None = "shared") -> list[Turn]:
    """Ask for the weather in one city after another: a call, its result, the answer, the next city. `salt` is
    the cache salt; None: each request has its own, so that none finds any KV."""
    messages: list[dict[str, Any]] = []
    turns: list[Turn] = []
    num_same = num_began = 0  # tokens that a prompt repeats; of the prompt with the last question
    with httpx.Client(base_url=stack.url, timeout=300) as client:
        for number in range(num_turns):
            messages.append(_asked(number, messages))
            before, began = _counted(stack), time.perf_counter()
            own_salt = f"{time.time_ns()}" if salt is None else salt
            message, usage, first_at = _ask(client, messages, own_salt)
            spent = {name: round(now - before[name]) for name, now in _counted(stack).items()}
            num_prompt = usage["prompt_tokens"]
            turns.append(
                Turn(
                    num_prompt_tokens=num_prompt,
                    num_new_tokens=num_prompt - num_same,
                    num_computed_tokens=spent["worker_prompt_tokens"],
                    moved_bytes=spent["kv_moved_bytes"],
                    num_handoffs=spent["handoffs"],
                    ttft_s=first_at - began,
                    answer=message,
                )
            )
            if messages[-1]["role"] == "user":
                num_began = num_prompt
            messages.append(message)
            # After an answer without calls, prompts lack the reasoning since its question.
            num_same = num_prompt + usage["completion_tokens"] if "tool_calls" in message else num_began
    return turns


def _asked(number: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    city = CITIES[number // 2 % len(CITIES)]
    if not messages or "tool_calls" not in messages[-1]:
        return {"role": "user", "content": f"What is the weather in {city}?"}
    call_id = messages[-1]["tool_calls"][0]["id"]
    result = {"city": city, "temperature": 7 + number, "wind": number, "humidity": 50 + number}
    return {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result)}


def answers_of(turns: list[Turn]) -> list[Any]:
    """The answers, without the ids of calls."""
    return [
        [turn.answer.get("content"), [call["function"] for call in turn.answer.get("tool_calls", ())]]
        for turn in turns
    ]


def _ask(
    client: httpx.Client, messages: list[dict[str, Any]], cache_salt: str
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """(the message as a client sends it back, usage, when its first part came)."""
    body = {
        "model": MODEL,
        "messages": messages,
        "tools": [TOOL],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "max_tokens": 200,
        "cache_salt": cache_salt,
    }
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    first_at, text = 0.0, ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if any(choice["delta"].get(part) for part in ("reasoning_content", "content", "tool_calls")):
                    first_at = first_at or time.perf_counter()
                text += choice["delta"].get("content") or ""
                for part in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(
                        part["index"], {"type": "function", "function": {"arguments": ""}}
                    )
                    call["id"] = part.get("id") or call["id"]
                    function = part["function"]
                    call["function"]["name"] = function.get("name") or call["function"]["name"]
                    call["function"]["arguments"] += function.get("arguments") or ""
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [calls[i] for i in sorted(calls)]
    return message, usage, first_at


def _counted(stack: Stack) -> dict[str, float]:
    stack.wait_idle(60)
    return {name: stack.gauge(f"baton_{name}_total", role=role) for name, role in _COUNTED_OF.items()}
