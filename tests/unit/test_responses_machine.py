"""Tools that the client's machine runs: functions to the model, items of their own types to the client."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from frontend.harmony.conversation import ToolResult
from frontend.responses.items import FunctionCallItem, PatchOutputItem, machine_call, turns
from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, ScriptedTokens

Json = dict[str, Any]

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
HI = {"role": "user", "content": "Hi"}
LINES = {"commands": ["ls", "pwd"], "timeout_ms": 5000}
PATCH = {"type": "update_file", "path": "a.py", "diff": "-a\n+b\n"}
CALLS: dict[str, tuple[Json, Json, Json]] = {
    "local_shell": (
        {"command": ["ls", "-l"], "working_directory": "/tmp", "timeout_ms": 5000},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 5000,
                "user": None,
                "working_directory": "/tmp",
            },
        },
        {"type": "local_shell_call_output", "output": "total 0"},
    ),
    "shell": (
        LINES,
        {"type": "shell_call", "action": LINES | {"max_output_length": None}},
        {"type": "shell_call_output", "output": [{"stdout": "total 0", "stderr": ""}]},
    ),
    "apply_patch": (
        PATCH,
        {"type": "apply_patch_call", "operation": PATCH},
        {"type": "apply_patch_call_output", "status": "completed", "output": "total 0"},
    ),
}


def test_a_patch_without_a_log_has_its_status() -> None:
    [turn] = turns([PatchOutputItem(call_id="c", status="failed")], lambda i: f"input[{i}]")
    assert turn == ToolResult(call_id="c", text="failed", path="input[0].call_id")


def answer(kind: str, arguments: str) -> str:
    return f"{THINK}<|channel|>commentary to=functions.{kind} <|constrain|>json<|message|>{arguments}<|call|>"


async def respond(client: Client, **fields: Any) -> Reply:
    reply = await client.post("/v1/responses", {"model": MODEL, "input": [HI], **fields})
    assert reply.status == 200, reply.body
    assert "x-baton-ignored" not in reply.headers
    return reply


def prompt(client: Client) -> str:
    return TOKENIZER.decode(client.tokens.requests[-1].token_ids)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_is_an_item_of_the_tools_own_type_and_comes_back(kind: str) -> None:
    arguments, item, output = CALLS[kind]
    client = Client(ScriptedTokens(answer(kind, json.dumps(arguments))))
    body = (await respond(client, tools=[{"type": kind}])).json
    Response.model_validate(body)
    assert f"type {kind} = (_: {{" in prompt(client)
    form = client.tokens.requests[0].sampling.guided
    assert form is not None
    assert form.last[0].grammar is not None

    thought, called = body["output"]
    assert called == item | {"id": called["id"], "call_id": called["call_id"], "status": "completed"}
    streamed = Client(ScriptedTokens(answer(kind, json.dumps(arguments))))
    events = (await respond(streamed, tools=[{"type": kind}], stream=True)).events
    told = [e["item"] for e in events if e["type"] == "response.output_item.done"][-1]
    assert told.keys() == called.keys()
    assert events[-1]["response"]["output"][-1] == told

    result = output | {"call_id": called["call_id"]}
    other = Client(ScriptedTokens(THINK))  # which does not know how the model wrote the call
    await respond(other, tools=[{"type": kind}], input=[HI, thought, called, result])
    said = prompt(other)
    written = json.dumps(arguments, separators=(",", ":"))
    assert f"assistant to=functions.{kind}commentary json{written}" in said
    assert "total 0" in said.partition(f"functions.{kind} to=assistant")[2]


async def test_the_output_of_a_local_shell_may_name_its_call_as_openai_does() -> None:
    arguments, _, output = CALLS["local_shell"]
    client = Client(ScriptedTokens(answer("local_shell", json.dumps(arguments))))
    _, called = (await respond(client, tools=[{"type": "local_shell"}])).json["output"]
    await respond(client, input=[HI, called, output | {"id": called["call_id"]}])
    assert "total 0" in prompt(client)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_null_in_an_item_is_an_absent_field(kind: str) -> None:
    _, item, output = CALLS[kind]
    nulls: Json = {"call_id": "c", "id": None, "status": None}
    if kind == "local_shell":
        item = item | {"action": item["action"] | {"env": None, "timeout_ms": None}}
    client = Client(ScriptedTokens(THINK))
    made = (await respond(client, input=[HI, item | nulls, nulls | output])).json
    assert "total 0" in prompt(client).partition(f"functions.{kind} to=assistant")[2]
    url = f"/v1/responses/{made['id']}/input_items"
    given = (await client.get(url)).json["data"]
    assert len({one["id"] for one in given}) == 3
    assert all(one["id"] for one in given)


@pytest.mark.parametrize("field", ["call_id", "action"])
async def test_a_null_for_what_a_call_needs_is_refused(field: str) -> None:
    item = {"call_id": "c", "type": "shell_call", "action": LINES, field: None}
    client = Client(ScriptedTokens(THINK))
    reply = await client.post("/v1/responses", {"model": MODEL, "input": [HI, item]})
    assert (reply.status, reply.error["param"]) == (400, f"input[1].{field}")


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("num_missing_bytes", [0, 5])
async def test_a_call_cut_by_the_token_limit_is_an_incomplete_function_call(
    kind: str, num_missing_bytes: int
) -> None:
    arguments = json.dumps(CALLS[kind][0])
    told = arguments[: len(arguments) - num_missing_bytes]
    limit = len(TOKENIZER.encode_text(answer(kind, told), allow_special=True)) - 1  # without its end
    fields: Json = {"tools": [{"type": kind}], "max_output_tokens": limit}
    body = (await respond(Client(ScriptedTokens(answer(kind, arguments))), **fields)).json
    Response.model_validate(body)
    assert body["status"] == "incomplete"
    called = body["output"][-1]
    assert (called["type"], called["name"], called["arguments"], called["status"]) == (
        "function_call",
        kind,
        told,
        "incomplete",
    )
    events = (await respond(Client(ScriptedTokens(answer(kind, arguments))), **fields, stream=True)).events
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"][-1]
    assert (done["status"], done["arguments"]) == ("incomplete", told)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_tool_can_be_demanded_by_its_type(kind: str, is_allowed: bool) -> None:
    client = Client(ScriptedTokens(answer(kind, json.dumps(CALLS[kind][0]))))
    choice: Json = {"type": kind}
    if is_allowed:
        choice = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    tools = [{"type": kind}, {"type": "function", "name": "f"}]
    assert (await respond(client, tools=tools, tool_choice=choice)).json["tool_choice"] == choice
    form = client.tokens.requests[0].sampling.guided
    assert form is not None
    assert all(f"functions.{kind}" in message.headers[0] for message in form.last)


SEARCH: Json = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds the team's tools.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "number"}},
    },
}
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}, "defer_loading": True}
FOUND = [{"type": "namespace", "name": "wiki", "description": "Pages.", "tools": [GET]}]


async def test_tools_that_a_search_of_the_client_finds_can_be_called() -> None:
    client = Client(ScriptedTokens(answer("tool_search", '{"query":"pages","limit":2}')))
    body = (await respond(client, tools=[SEARCH])).json
    Response.model_validate(body)
    assert "// Finds the team's tools.\ntype tool_search = (_: {" in prompt(client)
    thought, called = body["output"]
    assert (called["type"], called["execution"]) == ("tool_search_call", "client")
    assert called["arguments"] == {"query": "pages", "limit": 2}

    result = {"type": "tool_search_output", "call_id": called["call_id"], "status": None, "tools": FOUND}
    other = Client(ScriptedTokens(answer("tool_search", "{}").replace("functions.tool_search", "wiki.get")))
    made = (await respond(other, tools=[SEARCH], input=[HI, thought, called, result, called, result])).json
    said = prompt(other)
    assert said.count("namespace wiki {\n\ntype get =") == 1
    assert "Found: wiki.get" in said.partition("functions.tool_search to=assistant")[2]
    assert [made["output"][-1][name] for name in ("type", "namespace", "name")] == [
        "function_call",
        "wiki",
        "get",
    ]

    output = {"type": "function_call_output", "call_id": made["output"][-1]["call_id"], "output": "A page."}
    asked = {"tools": [SEARCH], "input": [output], "previous_response_id": made["id"]}
    await respond(other, **asked)
    assert "namespace wiki {\n\ntype get =" in prompt(other)


async def test_a_search_of_openais_servers_is_left_out_and_named() -> None:
    hosted = [
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": FOUND},
    ]
    client = Client(ScriptedTokens(THINK))
    body = {"model": MODEL, "input": [HI, *hosted], "tools": [{"type": "tool_search"}, GET]}
    reply = await client.post("/v1/responses", body)
    assert reply.headers["x-baton-ignored"] == (
        "input[].tool_search_call, input[].tool_search_output, tools[].tool_search"
    )
    assert "type get =" in prompt(client)  # nothing is deferred


async def test_a_mistake_in_a_tool_that_a_search_found_is_named() -> None:
    result = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function"}]}
    client = Client(ScriptedTokens(THINK))
    reply = await client.post("/v1/responses", {"model": MODEL, "input": [HI, result]})
    assert (reply.status, reply.error["param"]) == (400, "input[1].tools[0].name")


@pytest.mark.parametrize(
    "arguments", ['{"command": 1}', '{"commands":["a"],"x":' + "[" * 3000 + "]" * 3000 + "}"]
)
def test_arguments_that_do_not_fit_are_output_as_a_function_call(arguments: str) -> None:
    item = machine_call("shell", "call_1", arguments)
    assert isinstance(item, FunctionCallItem)
    assert (item.name, item.arguments, item.status) == ("shell", arguments, "completed")
