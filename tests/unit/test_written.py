"""A conversation's prompt grows at its end only: earlier answers are in it as the model wrote them. A token
count is that of the prompt which the same body makes."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted_frontend import (
    MODEL,
    TOKENIZER,
    Client,
    Reply,
    ScriptedFleet,
    ScriptedTokens,
    frontend,
)

Json = dict[str, Any]

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = {"role": "user", "content": "Hi"}
F: Json = {"type": "function", "function": {"name": "f"}}
PATCH: Json = {"type": "custom", "custom": {"name": "patch"}}
START = "<|start|>assistant"
THINK = f"<|channel|>analysis<|message|>Think.<|end|>{START}"
NOW = f"<|channel|>commentary<|message|>Now.<|end|>{START}"
# As the model writes calls, none of them as a prompt would be rendered.
CALLS = [
    ' to=functions.f<|channel|>commentary json<|message|>{"a":  1}<|call|>',
    '<|channel|>analysis to=functions.f code<|message|>{ "a": 1 }<|call|>',
    NOW + " to=functions.f<|channel|>analysis<|message|>{}<|call|>",
    NOW + NOW + " to=functions.f<|channel|>analysis<|message|>{}<|call|>",
    NOW + THINK + NOW + " to=functions.f<|channel|>commentary<|message|>{}<|call|>",
    f" to=functions.f<|channel|>commentary<|message|>{{}}<|end|>{START}<|channel|>final<|message|>Ok.<|end|>",
]
CUT = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a'
REPAIRED = "<|channel|>commentary functions.f<|message|>{}<|call|>"  # no `to=`
BOB = {"authorization": "Bearer bob"}


def grown(client: Client) -> bool:
    """Whether the second prompt begins with the first and its answer, after the same opening."""
    requests = client.tokens.requests[0], client.tokens.requests[-1]
    first, second = (request.token_ids for request in requests)
    opening = TOKENIZER.encode_text(START, allow_special=True)
    for request in requests:
        assert request.num_opening_tokens == len(first) - len(opening)
    answer = TOKENIZER.encode_text(client.tokens.texts[0], allow_special=True)
    return second[: len(first) + len(answer)] == first + answer


async def post(client: Client, path: str, body: Json, headers: Json | None = None) -> Reply:
    reply = await client.post(path, {"model": MODEL, **body}, headers or {"authorization": "Bearer alice"})
    assert reply.status == 200, reply.body
    return reply


async def count(client: Client, path: str, body: Json, headers: Json | None = None) -> int:
    """Of the prompt; chat has no path that counts, but `usage`."""
    answer = (await post(client, path, body, headers)).json
    return int(answer["usage"]["prompt_tokens"] if path == CHAT else answer["input_tokens"])


def response_round(answer: Json, *, left_out: str = "") -> Json:
    """The items of an answer, without those of a type, and the result of its call."""
    output = [item for item in answer["output"] if item["type"] != left_out]
    result: Json = {"type": "function_call_output", "output": "ok"}
    results = [result | {"call_id": item["call_id"]} for item in output if item["type"] == "function_call"]
    return {"input": [HI, *output, *results]}


def messages_round(answer: Json) -> Json:
    content = answer["content"]
    result: Json = {"type": "tool_result", "content": "ok"}
    results = [result | {"tool_use_id": block["id"]} for block in content if block["type"] == "tool_use"]
    return {"messages": [HI, {"role": "assistant", "content": content}, {"role": "user", "content": results}]}


def chat_round(answer: Json) -> Json:
    message = answer["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]
    ]
    return {"messages": [HI, message, *results]}


def without_reasoning(answer: Json) -> Json:
    message = answer["choices"][0]["message"]
    message["reasoning"] = message["reasoning_content"] = None
    return chat_round(answer)


class Api(NamedTuple):
    """How an API is asked, how its prompts are counted, and its body for the next round."""

    path: str
    counting: str
    body: Json
    next_round: Callable[[Json], Json]


MESSAGES = {
    "messages": [HI],
    "max_tokens": 3000,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
}
RESPONSE = {"input": [HI], "tools": [{"type": "function", "name": "f"}]}
COUNT_MESSAGES, COUNT_INPUT = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
THINKING = MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 1024}}
SILENT = {
    "chat": Api(CHAT, CHAT, {"messages": [HI], "tools": [F, PATCH]}, without_reasoning),
    "messages": Api("/v1/messages", COUNT_MESSAGES, MESSAGES, messages_round),
    "responses": Api(RESPONSES, COUNT_INPUT, RESPONSE, partial(response_round, left_out="reasoning")),
}
"""APIs whose answers come back without their reasoning."""
APIS = SILENT | {
    "messages, thinking": Api("/v1/messages", COUNT_MESSAGES, THINKING, messages_round),
    "responses, all items": Api(RESPONSES, COUNT_INPUT, RESPONSE, response_round),
}


@pytest.mark.parametrize("call", [*CALLS, CUT])
@pytest.mark.parametrize("name", APIS)
async def test_a_conversation_goes_on_from_the_very_tokens_and_is_counted_so(name: str, call: str) -> None:
    api, client = APIS[name], Client(ScriptedTokens(THINK + call))
    later = api.body | api.next_round((await post(client, api.path, api.body)).json)
    counted = await count(client, api.counting, later)
    others = await count(client, api.counting, later, BOB)
    await post(client, api.path, later)
    assert grown(client) is (call != CUT)
    assert counted == len(client.tokens.requests[-1].token_ids)
    assert others < counted or name not in SILENT, "Bob's request gets no thoughts of Alice's"


async def test_a_response_that_continues_another_is_counted_with_its_history() -> None:
    async with frontend(THINK + CALLS[0]) as client:
        first = (await post(client, RESPONSES, RESPONSE)).json
        result = response_round(first)["input"][-1]
        body = RESPONSE | {"input": [result], "previous_response_id": first["id"]}
        counted = await count(client, COUNT_INPUT, body)
        assert counted == (await post(client, RESPONSES, body)).json["usage"]["input_tokens"]


@pytest.mark.parametrize("calls", [REPAIRED, CALLS[0] + START + CALLS[1]])
async def test_the_last_call_of_an_answer_that_changed_is_rendered_with_its_thoughts(calls: str) -> None:
    client = Client(ScriptedTokens(THINK * 2 + calls))
    body = {"messages": [HI], "tools": [F]}
    answer = (await post(client, CHAT, body)).json
    del answer["choices"][0]["message"]["tool_calls"][:-1]
    await post(client, CHAT, body | without_reasoning(answer))
    assert not grown(client)
    prompt = TOKENIZER.decode(client.tokens.requests[1].token_ids, shows_special=True)
    assert "<|channel|>analysis<|message|>Think.\n\nThink.<|end|>" in prompt


TEXTS = st.text(min_size=1, max_size=12).filter(lambda text: text.encode(errors="replace").decode() == text)
HEADERS = st.sampled_from(
    [
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.f code<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>commentary<|message|>",
    ]
)


WRITTEN = st.builds(
    json.dumps, st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2), indent=st.sampled_from([None, 1])
)
LEADS = st.tuples(
    st.sampled_from(["<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"]), TEXTS
)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(APIS)),
    parts=st.lists(LEADS | st.tuples(HEADERS, WRITTEN), max_size=4),
    call=st.tuples(HEADERS, WRITTEN),
    size=st.integers(1, 7),
)
def test_any_answer_comes_back_in_its_own_tokens(
    name: str, parts: list[tuple[str, str]], call: tuple[str, str], size: int
) -> None:
    text = "".join(f"{head}{body}<|end|>{START}" for head, body in parts) + "".join(call) + "<|call|>"
    api, client = APIS[name], Client(ScriptedTokens(text, tokens_per_chunk=size))

    async def two_rounds() -> None:
        await post(client, api.path, api.body | api.next_round((await post(client, api.path, api.body)).json))

    asyncio.run(two_rounds())
    assert grown(client)


CALL = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
    " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
)


async def test_a_conversation_with_calls_keeps_the_date_of_its_beginning() -> None:
    client = Client(ScriptedTokens(CALL), fleet := ScriptedFleet())
    said = [HI]
    for day in ("2026-11-21", "2026-11-22", "2026-11-23"):
        fleet.current_date = day
        said += await turn_of(client, said)
    await turn_of(client, [HI])
    assert dates(client) == ["2026-11-21"] * 3 + ["2026-11-23"]
    said[1]["content"] = "Changed."  # an answer of another conversation
    await turn_of(client, said[:3])
    assert dates(client)[-1] == "2026-11-23"


async def turn_of(client: Client, said: list[Json]) -> list[Json]:
    """The answer to what was said so far, as a client keeps it, and what is said next."""
    reply = await client.chat(messages=said, tools=[F])
    message = reply.json["choices"][0]["message"]
    answer = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}
    calls = answer.get("tool_calls")
    return [answer, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "ok"} if calls else HI]


def dates(client: Client) -> list[str]:
    texts = (TOKENIZER.decode(request.token_ids, shows_special=True) for request in client.tokens.requests)
    return [text.partition("Current date: ")[2][:10] for text in texts]
