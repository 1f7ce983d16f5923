"""Raw completions, and the routes beside the generating ones, through the whole app with a scripted model."""

import time
from typing import Any

import msgspec
import pytest
from openai.types import Completion

from frontend.routing.health import Health
from tests.scripted_frontend import (
    CONTEXT_LENGTH,
    MODEL,
    TOKENIZER,
    Client,
    Reply,
    ScriptedFleet,
    ScriptedTokens,
)

TEXT = "Once upon a time"
ENDED = TEXT + "<|return|>"


async def complete(prompt: object, *, text: str = ENDED, **fields: Any) -> Reply:
    return await Client(ScriptedTokens(text)).complete(prompt, **fields)


async def get(path: str) -> Reply:
    return await Client(ScriptedTokens(ENDED)).get(path)


async def test_a_completion_is_the_raw_text_of_the_answer() -> None:
    reply = await complete("x", max_tokens=100)
    Completion.model_validate(reply.json)
    assert reply.json["choices"] == [{"index": 0, "text": TEXT, "finish_reason": "stop", "logprobs": None}]
    assert reply.json["usage"]["completion_tokens"] == len(TEXT) + 1
    assert (await complete("x", text="y" * 50)).json["choices"][0]["text"] == "y" * 16, "the default"


async def test_a_stream_of_a_completion_ends_with_its_reason_and_usage() -> None:
    reply = await complete("x", max_tokens=100, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = reply.events
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Onc", "e u", "pon", " a ", "tim", "e", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["stop"]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 1
    assert done == "[DONE]"
    unasked = await complete("x", max_tokens=100, stream=True, stream_options={"include_usage": False})
    assert [event["choices"][0]["index"] for event in unasked.events[:-1]] == [0] * 7


async def test_a_list_of_prompts_gives_n_choices_for_each() -> None:
    client = Client(ScriptedTokens(ENDED))
    reply = await client.complete(["a", "bc"], n=2)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    assert [len(r.token_ids) for r in client.tokens.requests] == [1, 1, 2, 2]
    assert reply.json["usage"]["prompt_tokens"] == 3


async def test_token_ids_and_spelled_control_tokens_are_the_prompt() -> None:
    client = Client(ScriptedTokens(ENDED))
    start = TOKENIZER.encode_text("<|start|>", allow_special=True)
    for prompt in ([1, 2, 3], [[4], [5, 6]], "<|start|>"):
        await client.complete(prompt)
    assert [r.token_ids for r in client.tokens.requests] == [[1, 2, 3], [4], [5, 6], start]


async def test_control_tokens_of_the_answer_are_shown_when_asked_for() -> None:
    raw = "<|channel|>final<|message|>Hi<|return|>"
    assert (await complete("x", text=raw)).json["choices"][0]["text"] == "finalHi"
    shown = (await complete("x", text=raw, skip_special_tokens=False)).json["choices"][0]["text"]
    assert shown == "<|channel|>final<|message|>Hi"


NEXT_ID = TOKENIZER.vocab_size


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", 1], [1, "a"], [NEXT_ID], [[1], [NEXT_ID]], [-1], {"a": 1}, ["a", ""]]
)
async def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    reply = await complete(prompt)
    assert reply.status == 400
    assert reply.error["param"].startswith("prompt")


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", range(1, 6))
async def test_logprobs_come_as_parallel_lists_whole_and_in_a_stream(
    tokens_per_chunk: int, shown: bool
) -> None:
    text = "ü<|end|>a\U0001f9ffb!"
    fields: dict[str, Any] = {"logprobs": 1, "max_tokens": 9, "skip_special_tokens": not shown}
    tokens = ScriptedTokens(text, tokens_per_chunk=tokens_per_chunk)
    [whole] = (await Client(tokens).complete("x", **fields)).json["choices"]
    chunks = (await Client(tokens).complete("x", stream=True, **fields)).events[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in whole["logprobs"].items():
        assert [value for part in parts if part for value in part[name]] == values
    end = len("<|end|>") if shown else 0
    assert whole["logprobs"]["text_offset"] == [0, 0, 1, *(end + n for n in (1, 2, 2, 2, 2, 3))]
    assert whole["logprobs"]["tokens"][2:4] == ["<|end|>", "a"]
    assert whole["logprobs"]["top_logprobs"][3] == {"a": -0.5}
    assert {request.sampling.prompt_logprobs for request in tokens.requests} == {
        None
    }  # they would cost a lot


@pytest.mark.parametrize("prompt", ["Say: <|start|>ü", [9, 8, 7]])
async def test_the_prompt_is_echoed(prompt: object) -> None:
    said = "Say: <|start|>ü" if isinstance(prompt, str) else TOKENIZER.decode([9, 8, 7])
    assert (await complete(prompt, echo=True)).json["choices"][0]["text"] == said + TEXT
    chunks = (await complete(prompt, echo=True, stream=True)).events[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said + TEXT


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_an_echoed_prompt_comes_with_its_log_probabilities(max_tokens: int) -> None:
    [choice] = (await complete("abc", echo=True, logprobs=1, max_tokens=max_tokens)).json["choices"]
    Completion.model_validate((await complete("abc", echo=True, max_tokens=max_tokens)).json)
    answer = TEXT[:max_tokens]
    assert choice["text"] == "abc" + answer
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"abc", *answer]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5][: 3 + max_tokens]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.25}]
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "max_tokens": 2}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "max_tokens": 1, "stream": True}, "stream"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"logprobs": 6}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_cannot_be_echoed_is_refused(fields: dict[str, Any], param: str) -> None:
    reply = await complete("abc", **fields)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_models_are_listed_and_found_by_a_name_with_a_slash() -> None:
    [model] = (await get("/v1/models")).json["data"]
    assert model["id"] == MODEL
    assert model["context_length"] == model["max_model_len"] == CONTEXT_LENGTH
    assert abs(model["created"] - time.time()) < 3600
    assert (await get(f"/v1/models/{MODEL}")).json["id"] == MODEL
    assert (await get("/v1/models/other")).error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, set()),
        ("GET", "/v1/models/", 404, set()),
        ("PUT", "/v1/completions", 405, {"POST"}),
        ("PUT", "/health", 405, {"GET", "HEAD"}),
        ("PUT", "/v1/responses/x", 405, {"DELETE", "GET"}),
        ("GET", "/v1/responses/input_tokens", 405, {"POST"}),
    ],
)
async def test_what_no_route_answers_is_an_envelope_too(
    method: str, path: str, status: int, allow: set[str]
) -> None:
    reply = await Client(ScriptedTokens("")).request(method, path, b"")
    assert (reply.status, set(filter(None, reply.headers.get("allow", "").split(", ")))) == (status, allow)
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert ("method" in reply.error["code"]) == ("; allowed: " in reply.error["message"]) == bool(allow)


async def test_a_page_that_fails_does_not_say_why() -> None:
    class Broken(ScriptedFleet):
        async def look(self) -> Health:
            raise RuntimeError("secret")

    client, said = Client(ScriptedTokens(ENDED), Broken()), bytearray()
    client.on_write = said.extend
    with pytest.raises(RuntimeError, match="secret"):  # for the server's log
        await client.get("/health")
    assert msgspec.json.decode(bytes(said))["error"]["message"].startswith("Internal server error")
    assert b"secret" not in said
