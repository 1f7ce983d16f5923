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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [CALL, CUT])
async def test_the_tokens_of_a_response_after_a_tool_round_are_counted_as_they_are_used(
    call: str, stream: bool
) -> None:
    client = Client(ScriptedTokens(THINK + call))
    body: Json = {"tools": [{"type": "function", "name": "f"}], "store": False}
    output = (await post(client, "/v1/responses", {"input": [HI], **body})).json["output"]
    (made,) = [item for item in output if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "ok"}
    body["input"] = [HI, made, result]
    counted = await count(client, "/v1/responses/input_tokens", body)
    others = await count(client, "/v1/responses/input_tokens", body, BOB)
    reply = await post(client, "/v1/responses", {**body, "stream": stream})
    answer = reply.events[-1]["response"] if stream else reply.json
    used, sent = answer["usage"]["input_tokens"], len(client.tokens.requests[-1].token_ids)
    assert counted == used == sent
    assert others < counted, "Bob's request gets no thoughts of Alice's"


async def test_a_response_that_continues_another_is_counted_with_its_history() -> None:
    async def counts() -> tuple[int, int]:
        async with frontend(THINK + CALL) as client:
            tools = [{"type": "function", "name": "f"}]
            first = (await post(client, "/v1/responses", {"input": [HI], "tools": tools})).json
            call_id = first["output"][-1]["call_id"]
            result = {"type": "function_call_output", "call_id": call_id, "output": "ok"}
            body = {"input": [result], "previous_response_id": first["id"], "tools": tools}
            counted = await count(client, "/v1/responses/input_tokens", body)
            answer = (await post(client, "/v1/responses", body)).json
            return counted, answer["usage"]["input_tokens"]

    counted, used = await counts()
    assert counted == used


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("call", [CALL, CUT])
async def test_the_tokens_of_a_message_after_a_tool_round_are_counted_as_they_are_used(
    call: str, stream: bool
) -> None:
    client = Client(ScriptedTokens(THINK + call))
    body: Json = {"tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    asked = {**body, "max_tokens": 500}
    content = (await post(client, "/v1/messages", {"messages": [HI], **asked})).json["content"]
    (made,) = [block for block in content if block["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": "ok"}
    said = [HI, {"role": "assistant", "content": [made]}, {"role": "user", "content": [result]}]
    counted = await count(client, "/v1/messages/count_tokens", {"messages": said, **body})
    others = await count(client, "/v1/messages/count_tokens", {"messages": said, **body}, BOB)
    reply = await post(client, "/v1/messages", {"messages": said, **asked, "stream": stream})
    usage = (reply.events[-2] if stream else reply.json)["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert others < counted, "Bob's request gets no thoughts of Alice's"


@pytest.mark.parametrize("call", [CALL, CUT])
async def test_a_chat_is_tokenised_with_the_thoughts_that_its_prompt_gets(call: str) -> None:
    client = Client(ScriptedTokens(THINK + call))
    tools = [{"type": "function", "function": {"name": "f"}}]
    path = "/v1/chat/completions"
    made = (await post(client, path, {"messages": [HI], "tools": tools})).json["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "ok"}
    told = {key: made[key] for key in ("role", "content", "tool_calls")}
    body = {"messages": [HI, told, result], "tools": tools}
    counted = await count(client, "/tokenize", body)
    usage = (await post(client, path, body)).json["usage"]
    assert counted == usage["prompt_tokens"]
