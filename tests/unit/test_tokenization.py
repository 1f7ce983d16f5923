"""`/tokenize` and `/detokenize` through the whole app."""

from typing import Any

import pytest

from frontend.text.tokenizer import COUNTED_CONTEXTS
from tests.scripted_frontend import (
    CONTEXT_LENGTH,
    MODEL,
    TOKENIZER,
    Client,
    Reply,
    ScriptedTokens,
)

MESSAGES = [{"role": "user", "content": "Hi"}]


async def post(path: str, **body: Any) -> Reply:
    return await Client(ScriptedTokens("")).post(path, {"model": MODEL, **body})


async def test_a_prompt_is_tokenised_with_its_control_tokens_and_comes_back() -> None:
    tokens = TOKENIZER.encode_text("<|start|>wörld", allow_special=True)
    reply = await post("/tokenize", prompt="<|start|>wörld", add_special_tokens=False)
    assert reply.json == {"count": len(tokens), "max_model_len": CONTEXT_LENGTH, "tokens": tokens}
    assert "x-baton-ignored" not in reply.headers
    assert (await post("/detokenize", tokens=tokens)).json == {"prompt": "<|start|>wörld"}


@pytest.mark.parametrize("field", ["chat_template_args", "chat_template_kwargs"])
async def test_messages_are_tokenised_as_chat_completions_render_them(field: str) -> None:
    more = {"tools": [{"type": "function", "function": {"name": "f"}}], field: {"model_identity": "Ada"}}

    client = Client(ScriptedTokens("<|return|>"))
    body = {"model": MODEL, "messages": MESSAGES, "reasoning_effort": "low", **more}
    await client.chat(**body)
    counted = (await client.post("/tokenize", body)).json["tokens"]
    assert counted == list(client.tokens.requests[0].token_ids)


COUNTED = COUNTED_CONTEXTS * CONTEXT_LENGTH


async def test_a_prompt_longer_than_the_context_is_counted_and_one_longer_than_two_is_refused() -> None:
    assert (await post("/tokenize", prompt="x" * COUNTED)).json["count"] == COUNTED > CONTEXT_LENGTH
    reply = await post("/tokenize", prompt="x" * (COUNTED + 1))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400, "context_length_exceeded", "prompt",
    )  # fmt: skip
    assert f"`prompt` has more than {COUNTED} tokens" in reply.error["message"]


async def test_two_contexts_of_tokens_have_a_text_and_more_are_refused() -> None:
    tokens = TOKENIZER.encode_text("x") * COUNTED
    assert (await post("/detokenize", tokens=tokens)).json == {"prompt": "x" * COUNTED}
    reply = await post("/detokenize", tokens=[*tokens, 1])
    assert (reply.status, reply.error["code"], reply.error["param"]) == (
        400, "context_length_exceeded", "tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": None}, 400, "model"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [99_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [TOKENIZER.vocab_size]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
async def test_what_cannot_be_served_names_the_field(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    reply = await post(path, **body)
    assert (reply.status, reply.error["param"]) == (status, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ],
)
async def test_requests_and_their_unknown_fields_are_counted(path: str, body: dict[str, Any]) -> None:
    client = Client(ScriptedTokens(""))
    reply = await client.post(path, {"model": MODEL, "foo": 1, **body})
    assert reply.headers["x-baton-ignored"] == "foo"
    assert client.metric("baton_ignored_fields_total", field="foo") == 1
    assert client.metric("baton_requests_total", route=path, model=MODEL, status="200") == 1
