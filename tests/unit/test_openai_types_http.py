"""Every answer and every event, field by field against the OpenAI SDK's types, strictly."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.scripted_frontend import MODEL, Client, ScriptedTokens

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}<|call|>'
SAID = [THINK + "<|channel|>final<|message|>Hello<|return|>", THINK + PREAMBLE + CALL]
FUNCTION = {"name": "f", "description": "Does it.", "parameters": {"type": "object"}, "strict": True}
# Fields that the SDK's types do not have: reasoning is known to clients by these names, a model's context is
# Baton's own, and OpenAI's API has the other two though the SDK has not.
EXTRA = {
    "ChatCompletionMessage.reasoning", "ChatCompletionMessage.reasoning_content",
    "ChoiceDelta.reasoning", "ChoiceDelta.reasoning_content", "Model.context_length", "Model.max_model_len",
    "Response.store", "ResponseFunctionCallArgumentsDoneEvent.name",
}  # fmt: skip


def extra_fields(found: object) -> Iterator[str]:
    """`Type.field` of each field that a type of the SDK does not have, however deep."""
    if isinstance(found, BaseModel):
        yield from (f"{type(found).__name__}.{name}" for name in found.model_extra or {})
        yield from (extra for _, value in found for extra in extra_fields(value))
    elif isinstance(found, list):
        yield from (extra for value in found for extra in extra_fields(value))


def check(body: object, kind: Any) -> None:
    """Types as they are written, nothing missing, nothing that is not documented."""
    found = TypeAdapter(kind).validate_json(json.dumps(body), strict=True)
    assert set(extra_fields(found)) <= EXTRA


def post(said: str, path: str, **fields: Any) -> Any:
    reply = asyncio.run(Client(ScriptedTokens(said)).post(path, {"model": MODEL, **fields}))
    assert reply.status == 200, reply.json
    return reply.events if fields.get("stream") else reply.json


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("limit", [4096, 20])
def test_a_response_and_its_events(said: str, limit: int) -> None:
    asked: dict[str, Any] = {
        "input": "Hi", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": limit,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2, "metadata": {"a": "b"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    }  # fmt: skip
    check(post(said, "/v1/responses", **asked), Response)
    for event in post(said, "/v1/responses", stream=True, **asked):
        check(event, ResponseStreamEvent)


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("limit", [4096, 20])
def test_a_chat_completion_and_its_chunks(said: str, limit: int) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True, "top_logprobs": 2,
        "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": limit, "metadata": {"a": "b"},
    }  # fmt: skip
    check(post(said, "/v1/chat/completions", **asked), ChatCompletion)
    asked["stream_options"] = {"include_usage": True}
    *chunks, done = post(said, "/v1/chat/completions", stream=True, **asked)
    assert done == "[DONE]"
    for chunk in chunks:
        check(chunk, ChatCompletionChunk)


async def test_a_model() -> None:
    check((await Client(ScriptedTokens("")).get(f"/v1/models/{MODEL}")).json, Model)
