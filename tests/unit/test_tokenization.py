"""`/tokenize` through the whole app."""

from typing import Any

import pytest

from frontend.text.tokenizer import COUNTED_CONTEXTS
from tests.scripted_frontend import CONTEXT_LENGTH, MODEL, TOKENIZER, Client, Reply, ScriptedTokens

MESSAGES = [{"role": "user", "content": "Hi"}]


async def tokenized(**body: Any) -> Reply:
    return await Client(ScriptedTokens("")).post("/tokenize", {"model": MODEL, **body})


async def test_a_prompt_is_tokenised_with_its_control_tokens() -> None:
    tokens = TOKENIZER.encode_text("<|start|>wörld", allow_special=True)
    reply = await tokenized(prompt="<|start|>wörld", add_special_tokens=False)
    assert reply.json == {"count": len(tokens), "max_model_len": CONTEXT_LENGTH, "tokens": tokens}
    assert "x-baton-ignored" not in reply.headers


@pytest.mark.parametrize("field", ["chat_template_args", "chat_template_kwargs"])
async def test_messages_are_tokenised_as_chat_completions_render_them(field: str) -> None:
    more = {"tools": [{"type": "function", "function": {"name": "f"}}], field: {"reasoning_effort": "low"}}
    client = Client(ScriptedTokens("<|return|>"))
    body = {"model": MODEL, "messages": MESSAGES, **more}
    await client.chat(**body)
    counted = (await client.post("/tokenize", body)).json["tokens"]
    assert counted == list(client.tokens.requests[0].token_ids)


COUNTED = COUNTED_CONTEXTS * CONTEXT_LENGTH


async def test_a_prompt_longer_than_the_context_is_counted_and_one_longer_than_two_is_refused() -> None:
    assert (await tokenized(prompt="x" * COUNTED)).json["count"] == COUNTED > CONTEXT_LENGTH
    reply = await tokenized(prompt="x" * (COUNTED + 1))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400, "context_length_exceeded", "prompt",
    )  # fmt: skip
    assert f"`prompt` has more than {COUNTED} tokens" in reply.error["message"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "model": None}, 400, "model"),
        ({"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
    ],
)
async def test_what_cannot_be_served_names_the_field(body: dict[str, Any], status: int, param: str) -> None:
    reply = await tokenized(**body)
    assert (reply.status, reply.error["param"]) == (status, param)


async def test_requests_and_their_unknown_fields_are_counted() -> None:
    client = Client(ScriptedTokens(""))
    reply = await client.post("/tokenize", {"model": MODEL, "foo": 1, "prompt": "x"})
    assert reply.headers["x-baton-ignored"] == "foo"
    assert client.metric("baton_ignored_fields_total", field="foo") == 1
    assert client.metric("baton_requests_total", route="/tokenize", model=MODEL, status="200") == 1
