"""What clients send to the four APIs, and the answers in Harmony that a scripted model gives to it.

A prompt names its answer: `Case N`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from frontend.text.tokenizer import ModelTokenizer, SpecialToken

Json = dict[str, Any]

_DATA = Path(__file__).parent / "data"
_THOUGHT = "<|channel|>analysis<|message|>Look it up: é 日本.<|end|><|start|>assistant"
_CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>'
_FINAL = "<|channel|>final<|message|>"
ANSWERS: Final = {
    "text": f"{_THOUGHT}{_FINAL}Good morning. 日本 👍 STOP and more.<|return|>",
    "call": f"{_THOUGHT}{_CALL}",
    "preamble": f"{_THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_CALL}",
    "json": f'{_FINAL}{{"x": 1, "y": "ü"}}<|return|>',
    "raw": "No Harmony here, STOP, 日本 only text.<|return|>",
    "digits": "123<|return|>",
}
_SCHEMA: Json = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "string"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
_LOOK: Json = {"type": "object", "properties": {"x": {"type": "integer"}}}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _LOOK}}]
_FLAT_TOOLS = [{"type": "function", "name": "look", "parameters": _LOOK}]
_CLAUDES_TOOLS = [{"name": "look", "description": "Looks.", "input_schema": _LOOK}]
_NAMED: Json = {"type": "function", "function": {"name": "look"}}
_JSON_SCHEMA: Json = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": _SCHEMA}}
_CALLED: Json = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    ],
}
_PARTS = [{"type": "text", "text": "Part one."}, {"type": "text", "text": "Part two."}]

# (answer, further fields); more `messages` come around the one that names the answer.
_CHATS: list[tuple[str, Json]] = [
    ("text", {}),
    ("text", {"temperature": 0, "seed": 7}),
    ("text", {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": _PARTS}]}),
    (
        "text",
        {"messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Go"}]},
    ),
    ("text", {"reasoning_effort": "high", "max_completion_tokens": 12}),
    ("text", {"reasoning_effort": "low", "max_tokens": 20}),
    ("text", {"stop": "STOP"}),
    ("text", {"stop": ["never", "日本", "more"]}),
    ("text", {"logprobs": True}),
    ("text", {"logprobs": True, "top_logprobs": 2, "stop": ["STOP"]}),
    ("text", {"n": 3, "temperature": 0.7}),
    ("text", {"n": 2, "logprobs": True, "max_tokens": 9}),
    ("text", {"stream_options": {"include_usage": True}}),
    ("text", {"top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1}),
    ("call", {"tools": _TOOLS}),
    ("call", {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    ("call", {"tools": _TOOLS, "tool_choice": _NAMED}),
    ("call", {"tools": _TOOLS, "tool_choice": "none"}),
    ("call", {"tools": _TOOLS, "logprobs": True, "top_logprobs": 1}),
    ("call", {"tools": _TOOLS, "max_tokens": 40}),
    ("preamble", {"tools": _TOOLS, "stream_options": {"include_usage": True}}),
    (
        "text",
        {"tools": _TOOLS, "messages": [_CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "7"}]},
    ),
    ("json", {"response_format": {"type": "json_object"}}),
    ("json", {"response_format": _JSON_SCHEMA}),
    ("json", {"response_format": _JSON_SCHEMA, "tools": _TOOLS}),
    ("text", {"max_tokens": 0}),
    ("text", {"temperature": 9}),
    ("text", {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "none_such"}}}),
]
_COMPLETIONS: list[tuple[str, Json]] = [
    ("raw", {}),
    ("raw", {"max_tokens": 5}),
    ("raw", {"max_tokens": 1, "logprobs": 2}),
    ("raw", {"logprobs": 1}),
    ("raw", {"stop": ["STOP", "only"]}),
    ("raw", {"stop": "日", "logprobs": 0}),
    ("raw", {"n": 2, "best_of": 2}),
    ("raw", {"echo": True, "max_tokens": 6}),
    ("raw", {"ignore_eos": True, "max_tokens": 300}),
    ("text", {"skip_special_tokens": False}),
    ("text", {"min_tokens": 3, "stream_options": {"include_usage": True}}),
    ("digits", {"guided_regex": "[0-9]{3}"}),
    ("json", {"guided_json": _SCHEMA}),
    ("raw", {"logprobs": 99}),
]
_RESPONSES: list[tuple[str, Json]] = [
    ("text", {}),
    ("text", {"instructions": "Be short.", "temperature": 0}),
    ("text", {"reasoning": {"effort": "high"}, "max_output_tokens": 16}),
    ("text", {"store": False, "include": ["reasoning.encrypted_content"]}),
    ("text", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
    ("text", {"metadata": {"a": "b"}, "truncation": "auto"}),
    ("call", {"tools": _FLAT_TOOLS}),
    ("call", {"tools": _FLAT_TOOLS, "tool_choice": "required"}),
    ("call", {"tools": _FLAT_TOOLS, "tool_choice": {"type": "function", "name": "look"}}),
    ("preamble", {"tools": _FLAT_TOOLS, "parallel_tool_calls": False}),
    ("json", {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": _SCHEMA}}}),
    ("json", {"text": {"format": {"type": "json_object"}}}),
    ("text", {"previous_response_id": "resp_none"}),
]
_MESSAGES: list[tuple[str, Json]] = [
    ("text", {}),
    ("text", {"system": "Be short.", "temperature": 0}),
    ("text", {"max_tokens": 15}),
    ("text", {"stop_sequences": ["STOP"]}),
    ("text", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}),
    ("text", {"top_k": 5, "top_p": 0.9}),
    ("call", {"tools": _CLAUDES_TOOLS}),
    ("call", {"tools": _CLAUDES_TOOLS, "tool_choice": {"type": "any"}}),
    ("call", {"tools": _CLAUDES_TOOLS, "tool_choice": {"type": "tool", "name": "look"}}),
    ("preamble", {"tools": _CLAUDES_TOOLS, "tool_choice": {"type": "auto"}}),
    ("text", {"max_tokens": -1}),
]


def requests() -> Iterator[tuple[str, Json]]:
    """(path, body) of each request."""
    numbers = {name: number for number, name in enumerate(ANSWERS)}
    for answer, fields in _CHATS:
        asked = {"role": "user", "content": f"Case {numbers[answer]}"}
        others = fields.get("messages", [])
        messages = [asked, *others] if _CALLED in others else [*others, asked]
        yield "/v1/chat/completions", fields | {"messages": messages}
    for answer, fields in _COMPLETIONS:
        yield "/v1/completions", {"prompt": f"Case {numbers[answer]}: ", "max_tokens": 99} | fields
    for answer, fields in _RESPONSES:
        yield "/v1/responses", {"input": f"Case {numbers[answer]}"} | fields
    for answer, fields in _MESSAGES:
        messages = [{"role": "user", "content": f"Case {numbers[answer]}"}]
        yield "/v1/messages", {"messages": messages, "max_tokens": 99} | fields


_CONTROL = re.compile(r"(<\|(?:byte:..|[a-z]+)\|>)")
_TOOL_NAME = re.compile(r"[\w-]+")


def write_script(path: Path, tokenizer: ModelTokenizer) -> None:
    """The answers to `requests`, then to `harmony_requests`."""
    texts = [*ANSWERS.values(), *(case["tokens"] for case in _harmony_cases())]
    path.write_text(json.dumps([_tokens(text, tokenizer) for text in texts]))


def harmony_requests() -> Iterator[tuple[str, Json]]:
    """One chat request for each case of the parser that has tokens, and tools that a client could offer."""
    for number, case in enumerate(_harmony_cases(), len(ANSWERS)):
        names = case.get("tools", ["get_weather", "bash"])
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {} if case.get("may_call", True) else {"tool_choice": "none"}
        asked = [{"role": "user", "content": f"Case {number}"}]
        yield "/v1/chat/completions", {"messages": asked, "tools": tools} | choice


def _harmony_cases() -> list[Json]:
    cases: list[Json] = yaml.safe_load((_DATA / "harmony_cases.yaml").read_text())
    offered = [case for case in cases if all(map(_TOOL_NAME.fullmatch, case.get("tools", ())))]
    return [case for case in offered if case["tokens"]]


def _tokens(text: str, tokenizer: ModelTokenizer) -> list[int]:
    ids: list[int] = []
    for part in _CONTROL.split(text):
        if part.startswith("<|byte:"):
            byte = bytes([int(part[7:9], 16)])
            ids.append(next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == byte))
        elif part == "<|reserved|>":
            ids += tokenizer.encode_text("<|startoftext|>", allow_special=True)
        elif _CONTROL.fullmatch(part):
            ids.append(tokenizer.special_ids[SpecialToken(part)])
        else:
            ids += tokenizer.encode_text(part.replace("⟨|", "<|").replace("|⟩", "|>"))
    return ids
