"""Bad input never becomes a 5xx: any JSON in any field is an answer or a 400 that says why."""

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.chat import ChatBody
from frontend.completions import CompletionBody
from frontend.responses.body import ResponseBody
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
EDGES = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 1e308, "", "\0", "none", "\U0001f600", [], [[]], {}, [None]]
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | EDGES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "tool_calls", "id", "arguments"]
)
SHAPES = st.dictionaries(
    WORDS, JSON | st.sampled_from(["user", "assistant", "tool", "system", "text", "function"]), max_size=5
)
SCHEMA_WORDS = st.sampled_from(
    ["type", "properties", "items", "enum", "anyOf", "oneOf", "$ref", "required", "description", "default",
     "const"]
)  # fmt: skip
ITEM_WORDS = st.sampled_from(
    ["type", "role", "content", "id", "call_id", "name", "arguments", "output", "text", "summary"]
)
ITEM_KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text", "user"]
)
ITEMS = st.dictionaries(
    ITEM_WORDS, JSON | ITEM_KINDS | st.lists(st.dictionaries(ITEM_WORDS, JSON), max_size=2), max_size=5
)
SCHEMAS = st.recursive(
    JSON | st.sampled_from(["object", "array", "string"]),
    lambda inner: st.dictionaries(SCHEMA_WORDS, inner | st.lists(inner, max_size=2), max_size=4),
    max_leaves=10,
)


def answer(path: str, body: dict[str, Any]) -> Reply:
    return asyncio.run(Client(ScriptedTokens(ANSWER)).post(path, json.dumps(body).encode()))


def assert_sane(reply: Reply) -> None:
    assert reply.status in {200, 400, 404}
    if reply.status != 200:
        assert reply.error["message"].endswith(".")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(ChatBody.__struct_encode_fields__) | st.text(max_size=8), JSON | SHAPES, max_size=4
    )
)
def test_any_field_of_a_chat_body_is_served_or_refused(fields: dict[str, Any]) -> None:
    whole = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    assert_sane(answer("/v1/chat/completions", {**whole, **fields}))


@settings(max_examples=60, deadline=None)
@given(st.lists(SHAPES, max_size=3), st.lists(SHAPES, max_size=2))
def test_any_messages_and_tools_are_served_or_refused(messages: list[Any], tools: list[Any]) -> None:
    assert_sane(answer("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": tools}))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(SCHEMA_WORDS, SCHEMAS, max_size=4), st.text(), st.text())
def test_any_schema_of_a_tool_is_served_or_refused(schema: Any, description: str, called: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": description, "parameters": schema}}
    call = {"id": "c", "type": "function", "function": {"name": called, "arguments": description}}
    messages = [
        {"role": "user", "content": description},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": called},
    ]
    assert_sane(answer("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [tool]}))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_encode_fields__), JSON, max_size=3), JSON)
def test_any_field_of_a_completion_body_is_served_or_refused(fields: dict[str, Any], prompt: Any) -> None:
    assert_sane(answer("/v1/completions", {"model": MODEL, "prompt": prompt, **fields}))


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(ResponseBody.__struct_encode_fields__) | st.text(max_size=8), JSON | ITEMS, max_size=4
    ),
    st.lists(ITEMS, max_size=3) | JSON,
)
def test_any_field_of_a_response_body_is_served_or_refused(fields: dict[str, Any], items: Any) -> None:
    assert_sane(answer("/v1/responses", {"model": MODEL, "input": items, **fields}))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
async def test_any_bytes_are_refused_politely(raw: bytes) -> None:
    assert_sane(await Client(ScriptedTokens(ANSWER)).post("/v1/chat/completions", raw))
