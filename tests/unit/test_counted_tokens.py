"""A token count is that of the prompt which the same body makes, restored thoughts included."""

from typing import Any

import pytest

from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens, frontend

Json = dict[str, Any]

HI = {"role": "user", "content": "Hi"}
THINK = "<|channel|>analysis<|message|>Think long and hard.<|end|><|start|>assistant"
# As the model may write a call; a prompt renders it longer.
CALL = ' to=functions.f<|channel|>commentary json<|message|>{"a":  1}<|call|>'
CUT = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a'
ALICE = {"authorization": "Bearer alice"}
BOB = {"authorization": "Bearer bob"}


async def post(client: Client, path: str, body: Json, headers: Json = ALICE) -> Reply:
    reply = await client.post(path, {"model": MODEL, **body}, headers)
    assert reply.status == 200, reply.body
    return reply


async def count(client: Client, path: str, body: Json, headers: Json = ALICE) -> int:
    answer = (await post(client, path, body, headers)).json
    return int(answer.get("count") or answer["input_tokens"])


def response_round(answer: Json) -> Json:
    (made,) = [item for item in answer["output"] if item["type"] == "function_call"]
    return {"input": [HI, made, {"type": "function_call_output", "call_id": made["call_id"], "output": "ok"}]}


def messages_round(answer: Json) -> Json:
    (made,) = [block for block in answer["content"] if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": "ok"}
    return {"messages": [HI, {"role": "assistant", "content": [made]}, {"role": "user", "content": [result]}]}


def chat_round(answer: Json) -> Json:
    made = answer["choices"][0]["message"]
    told = {key: made[key] for key in ("role", "content", "tool_calls")}
    return {
        "messages": [HI, told, {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "ok"}]
    }


@pytest.mark.parametrize("call", [CALL, CUT])
@pytest.mark.parametrize(
    ("path", "counting", "asked", "fields", "next_round"),
    [
        ("/v1/responses", "/v1/responses/input_tokens", {"input": [HI]},
         {"tools": [{"type": "function", "name": "f"}], "store": False}, response_round),
        ("/v1/messages", "/v1/messages/count_tokens", {"messages": [HI]},
         {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 500}, messages_round),
        ("/v1/chat/completions", "/tokenize", {"messages": [HI]},
         {"tools": [{"type": "function", "function": {"name": "f"}}]}, chat_round),
    ],
)  # fmt: skip
async def test_the_tokens_after_a_tool_round_are_counted_as_they_are_used(  # noqa: PLR0917  a table
    path: str, counting: str, asked: Json, fields: Json, next_round: Any, call: str
) -> None:
    client = Client(ScriptedTokens(THINK + call))
    later = next_round((await post(client, path, asked | fields)).json) | fields
    counted = await count(client, counting, later)
    others = await count(client, counting, later, BOB)
    await post(client, path, later)
    assert counted == len(client.tokens.requests[-1].token_ids)
    assert others < counted, "Bob's request gets no thoughts of Alice's"


async def test_a_response_that_continues_another_is_counted_with_its_history() -> None:
    async with frontend(THINK + CALL) as client:
        tools = [{"type": "function", "name": "f"}]
        first = (await post(client, "/v1/responses", {"input": [HI], "tools": tools})).json
        call_id = first["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "ok"}
        body = {"input": [result], "previous_response_id": first["id"], "tools": tools}
        counted = await count(client, "/v1/responses/input_tokens", body)
        assert counted == (await post(client, "/v1/responses", body)).json["usage"]["input_tokens"]
