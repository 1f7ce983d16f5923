"""`/tokenize` and `/detokenize` through the whole app."""

import asyncio
from typing import Any

import pytest

from tests.scripted_frontend import CONTEXT_LENGTH, MODEL, TOKENIZER, Client, Reply, ScriptedTokens

MESSAGES = [{"role": "user", "content": "Hi"}]


def post(path: str, **body: Any) -> Reply:
    return asyncio.run(Client(ScriptedTokens("")).post(path, body))


def test_a_prompt_is_tokenised_with_its_control_tokens_and_comes_back() -> None:
    tokens = TOKENIZER.encode_text("<|start|>wörld", allow_special=True)
    reply = post("/tokenize", model=MODEL, prompt="<|start|>wörld", add_special_tokens=False)
    assert reply.json == {
        "count": len(tokens), "max_model_len": CONTEXT_LENGTH, "tokens": tokens, "token_strs": None,
    }  # fmt: skip
    assert post("/detokenize", model=MODEL, tokens=tokens).json == {"prompt": "<|start|>wörld"}


def test_messages_are_tokenised_as_chat_completions_render_them() -> None:
    async def prompts() -> tuple[list[int], list[int], list[int]]:
        client = Client(ScriptedTokens("<|return|>"))
        await client.chat(messages=MESSAGES, reasoning_effort="low")
        body = {"messages": MESSAGES, "reasoning_effort": "low"}
        whole = (await client.post("/tokenize", body)).json["tokens"]
        short = (await client.post("/tokenize", body | {"add_generation_prompt": False})).json["tokens"]
        return list(client.tokens.requests[0].token_ids), whole, short

    sent, whole, short = asyncio.run(prompts())
    assert whole == sent
    assert whole == short + TOKENIZER.encode_text("<|start|>assistant", allow_special=True)


def test_the_tokens_can_be_had_as_text() -> None:
    assert post("/tokenize", prompt="a<|end|>", return_token_strs=True).json["token_strs"] == ["a", "<|end|>"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0].role"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [99_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ],
)
def test_what_cannot_be_served_names_the_field(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    reply = post(path, **body)
    assert (reply.status, reply.error["param"]) == (status, param)


def test_unknown_fields_are_named_in_a_header() -> None:
    assert post("/tokenize", prompt="x", foo=1).headers["x-baton-ignored"] == "foo"
