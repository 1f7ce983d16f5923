"""The Messages API over HTTP, with a scripted model: blocks, events, tools, thinking, refusals, counts."""

import json
from datetime import datetime
from typing import Any

import pytest

from baton.errors import BatonError, EngineFailure
from frontend.http.exchange import MessagesError
from tests.scripted_frontend import (
    HI,
    MODEL,
    TOKENIZER,
    AliasedFleet,
    Client,
    Reply,
    ScriptedFleet,
    ScriptedTokens,
)

Json = dict[str, Any]

COUNT = "/v1/messages/count_tokens"
THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
ANSWER = THINK + "<|channel|>final<|message|>Hello wörld<|return|>"
PREAMBLE = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Rome"}<|call|>'
TOOL: Json = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {}}}}
FORMAT: Json = {"type": "json_schema", "schema": {"type": "object", "properties": {"city": {}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
TOOLSET = {"type": "mcp_toolset", "mcp_server_name": "docs"}
SHOWN = {"type": "enabled", "budget_tokens": 1024}
ONE_CALL = {"type": "auto", "disable_parallel_tool_use": True}
NUM_OPENING = len(TOKENIZER.encode_text("<|channel|>final<|message|>", allow_special=True))


def scripted(text: str = ANSWER, **script: Any) -> Client:
    return Client(ScriptedTokens(text, **script))


async def ask(client: Client | str = ANSWER, path: str = "/v1/messages", **fields: Any) -> Reply:
    """The reply to a body; `client` may be the text of a scripted model."""
    limit = {} if path == COUNT else {"max_tokens": 500}
    body = {"model": MODEL, "messages": HI, **limit, **fields}
    return await (scripted(client) if isinstance(client, str) else client).post(path, body)


BLOCKS = {
    "text": {"type", "text"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
}
USAGE = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}


def check_fields(message: Json) -> None:
    """Strict readers refuse fields that Anthropic's API omits, even if they are null."""
    assert message.keys() == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage",
    }  # fmt: skip
    assert message["usage"].keys() == USAGE | {"service_tier"}
    for block in message["content"]:
        assert block.keys() == BLOCKS[block["type"]]


def gathered(reply: Reply) -> Json:
    """The message that a stream's events make, held to the documented order."""
    events = reply.events
    names = [line[7:] for line in reply.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [e["type"] for e in events]
    assert names[:2] == ["message_start", "ping"]
    message: Json = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts: list[str] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts = []
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                message["content"][-1]["signature"] = delta["signature"]
            else:
                texts += [value for name, value in delta.items() if name != "type"]
        elif event["type"] == "content_block_stop":
            assert event["index"] == len(message["content"]) - 1
            block = message["content"][-1]
            whole = "".join(texts)
            name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            block[name] = json.loads(whole or "{}") if name == "input" else whole
    assert events[-2]["type"] == "message_delta"
    assert events[-1] == {"type": "message_stop"}
    assert events[-2]["usage"].keys() == USAGE
    end: Json = events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message | end


@pytest.mark.parametrize(
    ("text", "tools", "kinds"),
    [
        (ANSWER, [], ["thinking", "text"]),
        (THINK + CALL, [TOOL], ["thinking", "tool_use"]),
        (PREAMBLE + CALL + "<|start|>assistant" + CALL, [TOOL], ["text", "tool_use", "tool_use"]),
    ],
)
async def test_a_stream_and_a_whole_answer_are_the_same_message(
    text: str, tools: list[Json], kinds: list[str]
) -> None:
    client = scripted(text)
    whole = (await ask(client, tools=tools, thinking=SHOWN)).json
    streamed = gathered(await ask(client, tools=tools, thinking=SHOWN, stream=True))
    for message in (whole, streamed):
        check_fields(message)
        message["id"] = ""
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    reply = await ask(scripted(fail_at=36, error=EngineFailure("It broke.")), stream=True)
    assert reply.status == 200
    assert reply.body.decode().split("\n\n")[-2].startswith("event: error\ndata: ")
    assert reply.events[-1] == {"type": "error", "error": {"type": "api_error", "message": "It broke."}}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (ANSWER, {}),
        (ANSWER, {"stop_sequences": ["wör"]}),
        (CALL * 2, {"tools": [TOOL], "tool_choice": ONE_CALL}),
    ],
)
async def test_the_usage_has_all_tokens_read_and_excludes_cached_ones(
    text: str, ended: Json, stream: bool
) -> None:
    client = scripted(text, tokens_per_chunk=2)
    reply = await ask(client, stream=stream, **ended)
    usage = gathered(reply)["usage"] if stream else reply.json["usage"]
    num_tokens = len(TOKENIZER.encode_text(text, allow_special=True))
    assert usage["output_tokens"] < num_tokens if ended else usage["output_tokens"] == num_tokens
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] == len(client.tokens.requests[0].token_ids) - 2


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "Hello wörld"),
        ({"stop_sequences": ["wör"]}, "stop_sequence", "wör", "Hello "),
        ({"max_tokens": NUM_OPENING + 3, "stop_sequences": ["zzz"]}, "max_tokens", None, "Hel"),
    ],
)
async def test_the_reason_of_the_end_is_named(
    fields: Json, reason: str, sequence: str | None, text: str
) -> None:
    message = (await ask(ANSWER.removeprefix(THINK), **fields)).json
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert message["content"] == [{"type": "text", "text": text}]


async def test_an_answer_with_calls_that_a_stop_string_ends_is_to_be_continued() -> None:
    text = f"{CALL}<|start|>assistant{ANSWER}"
    message = (await ask(text, stop_sequences=["wör"], tools=[TOOL])).json
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_an_answer_that_fills_the_context_has_its_own_reason() -> None:
    roomy = scripted()
    await ask(roomy)
    length = len(roomy.tokens.requests[0].token_ids) + 5
    full = Client(ScriptedTokens(ANSWER), ScriptedFleet(context_length=length))
    assert (await ask(full)).json["stop_reason"] == "model_context_window_exceeded"
    assert (await ask(full, max_tokens=5)).json["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
async def test_an_alias_is_counted_under_its_model(path: str) -> None:
    client = Client(ScriptedTokens(ANSWER), AliasedFleet())
    assert (await ask(client, path, model="mine")).json.get("model", "mine") == "mine"
    assert client.metric("baton_requests_total", route=path, model=MODEL, status="200") == 1


@pytest.mark.parametrize(
    ("thinking", "kinds"),
    [
        (None, ["text"]),
        ({"type": "disabled"}, ["text"]),
        ({"type": "adaptive"}, ["thinking", "text"]),
        (SHOWN, ["thinking", "text"]),
        ({"type": "enabled", "display": "summarized"}, ["thinking", "text"]),
        ({"type": "adaptive", "display": "omitted"}, ["text"]),
    ],
)
async def test_thinking_is_shown_on_request(thinking: Json | None, kinds: list[str]) -> None:
    blocks = (await ask(thinking=thinking)).json["content"]
    assert [block["type"] for block in blocks] == kinds


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("", {}),
        ("Rome", {"arguments": "Rome"}),
        ("[1]", {"arguments": "[1]"}),
        ('{"a":', {"arguments": '{"a":'}),
        ('{"a":' * 1500 + "1" + "}" * 1500, {"arguments": '{"a":' * 1500 + "1" + "}" * 1500}),
    ],
)
async def test_the_input_of_a_call_is_always_an_object(written: str, given: Json) -> None:
    tokens = ScriptedTokens(CALL.replace('{"city":"Rome"}', written), tokens_per_chunk=2000)
    client = Client(tokens, ScriptedFleet(context_length=99_999))
    (call,) = (await ask(client, tools=[TOOL], max_tokens=20_000)).json["content"]
    assert call["input"] == given


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"tools": [TOOLSET], "mcp_servers": [{"name": "docs"}]}, "mcp_servers, tools[].mcp_toolset"),
        ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "none"}},
         "tools[].web_search_20250305"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "odd": 1},
         "odd, messages[].content[].image"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
async def test_what_cannot_be_used_is_left_out_and_named(path: str, fields: Json, ignored: str) -> None:
    client = scripted()
    reply = await ask(client, path, **fields)
    assert (reply.status, reply.headers["x-baton-ignored"]) == (200, ignored)
    for field in ignored.split(", "):
        assert client.metric("baton_ignored_fields_total", field=field) == 1


@pytest.mark.parametrize("depth", [100, 400, 5000])
async def test_content_nested_too_deeply_is_refused(depth: int) -> None:
    content = '{"type": "search_result", "content": [' * depth + '{"type": "image"}' + "]}" * depth
    body = (
        f'{{"model": "{MODEL}", "max_tokens": 9, "messages": [{{"role": "user", "content": [{content}]}}]}}'
    )
    reply = await scripted().request("POST", "/v1/messages", body.encode())
    assert reply.status == (200 if depth == 100 else 400), reply.body


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 99},
        {"type": "memory_20250818", "name": "memory"},
    ],
)
async def test_tools_that_anthropic_defines_and_the_client_runs_are_enforced(tool: Json) -> None:
    arguments = {"command": "view", "path": "/memories"}
    call = CALL.replace("get_weather", tool["name"]).replace('{"city":"Rome"}', json.dumps(arguments))
    client = scripted(call)
    reply = await ask(client, tools=[tool], tool_choice={"type": "tool", "name": tool["name"]})
    assert "x-baton-ignored" not in reply.headers
    (use,) = reply.json["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", tool["name"], arguments)
    form = client.tokens.requests[0].sampling.guided
    assert form is not None
    schema = json.loads(form.last[0].grammar or "")
    assert set(schema["required"]) <= schema["properties"].keys()
    assert schema["additionalProperties"] is False
    shown = client.tokens.requests[0].token_ids
    assert f"type {tool['name']} = (_: {{\ncommand:" in TOKENIZER.decode(shown)
    assert "any," not in TOKENIZER.decode(shown)
    assert (await ask(client, COUNT, tools=[tool])).json == {"input_tokens": len(shown)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": FORMAT}}, "output_config.format.schema"),
        ({"output_format": FORMAT}, "output_format.schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}, "tools[0].parameters"),
    ],
)
async def test_a_format_and_a_demanded_call_are_enforced(fields: Json, param: str) -> None:
    client = scripted()
    assert (await ask(client, **fields)).status == 200
    form = client.tokens.requests[0].sampling.guided
    assert form is not None
    [last] = form.last
    assert last.param == param
    assert json.loads(last.grammar or "")["properties"] == {"city": {}}


async def test_a_continued_thread_is_not_found_so_that_sdks_send_all_messages() -> None:
    assert "x-baton-ignored" not in (await ask(thread={"type": "create"})).headers
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    reply = await ask(thread=thread)
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    assert reply.error["details"] == {"error_code": "thread_not_found"}
    assert "details" not in (await ask(model="nope")).error


KINDS = {401: "authentication_error", 409: "invalid_request_error", 500: "api_error", 503: "overloaded_error"}


@pytest.mark.parametrize("status", KINDS)
def test_an_error_has_anthropics_type(status: int) -> None:
    class Refused(BatonError):
        """An error of that status."""

    Refused.status = status
    assert MessagesError.of(Refused("x")).error.type == KINDS[status]


@pytest.mark.parametrize("num_bytes", [4096, 10_000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(num_bytes: int, stream: bool) -> None:
    reply = await ask(messages=[{"role": "user", "content": "x" * num_bytes}], stream=stream)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    assert reply.error["message"].startswith("prompt is too long: ")


async def test_models_are_listed_in_anthropics_shape_for_its_clients() -> None:
    client = scripted()
    theirs = {"anthropic-version": "2023-06-01"}
    page = (await client.request("GET", "/v1/models", b"", theirs)).json
    (model,) = page.pop("data")
    assert page == {"first_id": MODEL, "last_id": MODEL, "has_more": False}
    assert (model["type"], model["id"], model["display_name"]) == ("model", MODEL, MODEL)
    assert datetime.fromisoformat(model["created_at"]).tzinfo is not None
    assert (await client.request("GET", f"/v1/models/{MODEL}", b"", theirs)).json == model
    missing = await client.request("GET", "/v1/models/nope", b"", theirs)
    assert missing.error["type"] == "not_found_error"
    assert (await client.get("/v1/models")).json["object"] == "list"
