"""Requests to a running stack, and accessors for the answers."""

from typing import Any

import httpx

from tests.stack import MODEL, Stack
from tests.system.test_serving import GUIDE
from tests.waiting import PATIENCE_S

Json = dict[str, Any]


def chat(stack: Stack, *messages: Json) -> Json:
    """The only choice of the answer to the guide's request with these messages."""
    asked = GUIDE | {"messages": list(messages)}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    found: Json = choice
    return found


def complete(stack: Stack, num_tokens: int = 120, **fields: object) -> str:
    """A greedy answer of `max_tokens` tokens, or with other `fields` than `ignore_eos`."""
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": num_tokens, "temperature": 0}
    body |= fields or {"ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text
