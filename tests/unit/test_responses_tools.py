"""Tools in Responses: namespaces, custom tools, those of the client's machine, which are
functions to the model and items of their own types to the client; and thoughts as summaries and under a seal.
"""

import json
import re
from typing import Any

import pytest
from openai.types.responses import Response

from baton.messages import Guided
from frontend.harmony.conversation import ToolResult
from frontend.responses.items import FunctionCallItem, PatchOutputItem, machine_call, turns
from tests.scripted_frontend import MODEL, TOKENIZER, Client, Reply, ScriptedTokens

Json = dict[str, Any]

THINK = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant"
CLOSE = {"type": "function", "name": "close", "parameters": {"type": "object"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOSE]}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
KEYS = (b"k" * 32, b"k" * 32, b"o" * 32)
HI = {"role": "user", "content": "Hi"}


def call(recipient: str, body: str, kind: str = " <|constrain|>json") -> str:
    return f"{THINK}<|channel|>commentary to={recipient}{kind}<|message|>{body}<|call|>"


def answer(kind: str, arguments: str) -> str:
    return call(f"functions.{kind}", arguments)


async def respond(client: Client, **fields: Any) -> Reply:
    reply = await client.post("/v1/responses", {"model": MODEL, "input": [HI], **fields})
    assert reply.status == 200, reply.body
    return reply


async def output(text: str, **fields: Any) -> list[Json]:
    """The items of an answer, which are the same whole and as a stream."""
    body = (await respond(Client(ScriptedTokens(text)), **fields)).json
    Response.model_validate(body)
    whole = body["output"]
    events = (await respond(Client(ScriptedTokens(text)), stream=True, **fields)).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    for shown in (whole, done):
        for item in shown:
            item.pop("id")
            item.pop("call_id", None)
            item.pop("encrypted_content", None)
    assert done == whole
    return list(whole)


def form_of(client: Client) -> Guided:
    form = client.tokens.requests[-1].sampling.guided
    assert form is not None
    return form


async def prompt(**fields: Any) -> str:
    client = Client(ScriptedTokens("<|channel|>final<|message|>Ok<|return|>"))
    await respond(client, **fields)
    return client.prompt


async def test_a_namespace_is_rendered_and_its_calls_carry_it() -> None:
    written = await prompt(tools=[AGENTS, CLOSE])
    assert "## agents\n\n// Sub-agents.\nnamespace agents {\n\ntype close" in written
    assert "} // namespace agents" in written
    assert "namespace functions {\n\ntype close" in written
    for namespace, shown in (("agents", {"namespace": "agents"}), ("functions", {})):
        (_, called) = await output(call(f"{namespace}.close", "{}"), tools=[AGENTS, CLOSE])
        wanted = {"type": "function_call", "name": "close", "arguments": "{}", "status": "completed"}
        assert called == wanted | shown


ONE_OF = {"type": "allowed_tools", "mode": "required"}


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "function", "name": "close"}, "functions.close"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents.close"),
        ({"type": "function", "name": "agents.close"}, "agents.close"),
        ({"type": "function", "name": "send"}, "agents.send"),
        (ONE_OF | {"tools": [{"type": "function", "name": "send"}]}, "agents.send"),
        *[({"type": kind}, f"functions.{kind}") for kind in ("local_shell", "shell", "apply_patch")],
        (ONE_OF | {"tools": [{"type": "shell"}]}, "functions.shell"),
    ],
)
async def test_a_tool_can_be_demanded(choice: Json, called: str) -> None:
    client = Client(ScriptedTokens(THINK))
    agents = AGENTS | {"tools": [CLOSE, CLOSE | {"name": "send"}]}
    tools = [agents, CLOSE, *({"type": kind} for kind in ("local_shell", "shell", "apply_patch"))]
    reply = await respond(client, tools=tools, tool_choice=choice)
    assert reply.json["tool_choice"] == choice
    form = form_of(client)
    recipients = {header.partition(" to=")[2] for message in form.last for header in message.headers}
    assert {re.split("[ <]", recipient)[0] for recipient in recipients} == {called}


async def test_a_custom_tool_takes_text_also_where_the_model_wrote_json() -> None:
    assert "type patch = (input: string) => any;" in await prompt(tools=[PATCH])
    text = call("functions.patch", json.dumps({"input": "*** Begin\nPatch"}), " code")
    (_, called) = await output(text, tools=[PATCH])
    wanted = {"type": "custom_tool_call", "name": "patch", "input": "*** Begin\nPatch"}
    assert called == wanted | {"status": "completed"}
    events = (await respond(Client(ScriptedTokens(text)), tools=[PATCH], stream=True)).events
    delta, done = (event for event in events if "custom" in event["type"])
    kind = "response.custom_tool_call_input"
    assert (delta["type"], delta["delta"]) == (f"{kind}.delta", called["input"])
    assert (done["type"], done["input"]) == (f"{kind}.done", called["input"])


@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(syntax: str) -> None:
    client = Client(ScriptedTokens(call("functions.patch", '{"input": "a"}', " code")))
    grammar = {"type": "grammar", "syntax": syntax, "definition": "start: /a/"}
    (_, called) = (await respond(client, tools=[PATCH | {"format": grammar}])).json["output"]
    assert called["input"] == '{"input": "a"}', "what a grammar allowed is the input itself"
    held = form_of(client).last[0]
    assert (held.syntax, held.grammar) == (syntax, "start: /a/")
    assert held.param == "tools[0].format.definition"


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_reasoning_is_a_summary_on_request(summary: str) -> None:
    text = THINK + "<|channel|>final<|message|>Ok<|return|>"
    thought, _ = await output(text, reasoning={"summary": summary})
    assert thought["summary"] == [{"type": "summary_text", "text": "Think."}]
    assert thought["content"] == []
    events = (await respond(Client(ScriptedTokens(text)), stream=True, reasoning={"summary": summary})).events
    kinds = list(dict.fromkeys(event["type"] for event in events if "summary" in event["type"]))
    names = ("part.added", "text.delta", "text.done", "part.done")
    assert kinds == [f"response.reasoning_summary_{name}" for name in names]


async def test_frontends_that_share_a_key_open_each_others_thoughts_if_unchanged() -> None:
    one, same, other = (Client(ScriptedTokens(call("functions.close", "{}")), key=key) for key in KEYS)
    include: Json = {"include": ["reasoning.encrypted_content"], "tools": [CLOSE]}
    thought, called = (await respond(one, reasoning={"summary": "auto"}, **include)).json["output"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "ok"}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for client, is_known in ((same, True), (other, False)):
        reply = await respond(client, input=[HI, sealed, called, result], **include)
        assert ("Think." in client.prompt) is is_known
        assert ("encrypted_content" in reply.headers.get("x-baton-ignored", "")) is not is_known
    sealed["encrypted_content"] = thought["encrypted_content"][:-4] + "AAAA"
    body = {"model": MODEL, "input": [HI, sealed, called, result], **include}
    refused = await same.post("/v1/responses", body)
    assert (refused.status, refused.error["param"]) == (400, "input[1].encrypted_content")


async def test_calls_come_back_as_they_were() -> None:
    function = {"type": "function_call", "name": "close", "namespace": "agents", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}
    for called, recipient in ((function, "agents.close"), (custom, "functions.patch")):
        result = {"type": f"{called['type']}_output", "call_id": "c", "output": "done"}
        written = await prompt(tools=[AGENTS, PATCH], input=[HI, called | {"call_id": "c"}, result])
        assert f"assistant to={recipient}" in written
        assert f"{recipient} to=assistantcommentarydone" in written


EXEC: Json = {"command": ["ls", "-l"], "working_directory": "/tmp", "timeout_ms": 5000}
LINES = {"commands": ["ls", "pwd"], "timeout_ms": 5000}
CHANGE = {"type": "update_file", "path": "a.py", "diff": "-a\n+b\n"}
CALLS: dict[str, tuple[Json, Json, Json]] = {
    "local_shell": (
        EXEC,
        {"type": "local_shell_call", "action": EXEC | {"type": "exec", "env": {}, "user": None}},
        {"type": "local_shell_call_output", "output": "total 0"},
    ),
    "shell": (
        LINES,
        {"type": "shell_call", "action": LINES | {"max_output_length": None}},
        {"type": "shell_call_output", "output": [{"stdout": "total 0", "stderr": ""}]},
    ),
    "apply_patch": (
        CHANGE,
        {"type": "apply_patch_call", "operation": CHANGE},
        {"type": "apply_patch_call_output", "status": "completed", "output": "total 0"},
    ),
}


def test_a_patch_without_a_log_has_its_status() -> None:
    [turn] = turns([], {"input[0]": PatchOutputItem(call_id="c", status="failed")})
    assert turn == ToolResult(call_id="c", text="failed", path="input[0].call_id")


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_is_an_item_of_the_tools_own_type_and_comes_back(kind: str) -> None:
    arguments, item, shown = CALLS[kind]
    client = Client(ScriptedTokens(answer(kind, json.dumps(arguments))))
    body = (await respond(client, tools=[{"type": kind}])).json
    Response.model_validate(body)
    assert f"type {kind} = (_: {{" in client.prompt
    assert form_of(client).last[0].grammar is not None
    thought, called = body["output"]
    assert called == item | {"id": called["id"], "call_id": called["call_id"], "status": "completed"}
    assert len(await output(answer(kind, json.dumps(arguments)), tools=[{"type": kind}])) == 2
    result = shown | {"call_id": called["call_id"]}
    other = Client(ScriptedTokens(THINK))  # which has not seen the call
    await respond(other, tools=[{"type": kind}], input=[HI, thought, called, result])
    written = json.dumps(arguments, separators=(",", ":"))
    assert f"assistant to=functions.{kind}commentary json{written}" in other.prompt
    assert "total 0" in other.prompt.partition(f"functions.{kind} to=assistant")[2]


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("num_missing_bytes", [0, 5])
async def test_a_call_cut_by_the_token_limit_is_an_incomplete_function_call(
    kind: str, num_missing_bytes: int
) -> None:
    arguments = json.dumps(CALLS[kind][0])
    shown = arguments[: len(arguments) - num_missing_bytes]
    limit = len(TOKENIZER.encode_text(answer(kind, shown), allow_special=True)) - 1  # without its end
    *_, called = await output(answer(kind, arguments), tools=[{"type": kind}], max_output_tokens=limit)
    assert called == {"type": "function_call", "name": kind, "arguments": shown, "status": "incomplete"}


ASKED = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "number"}}}
SEARCH: Json = {"type": "tool_search", "execution": "client", "parameters": ASKED}
SEARCH["description"] = "Finds the team's tools."
GET = {"type": "function", "name": "get", "parameters": {"type": "object"}, "defer_loading": True}
FOUND = [{"type": "namespace", "name": "wiki", "description": "Pages.", "tools": [GET]}]


async def test_tools_that_a_search_of_the_client_finds_can_be_called() -> None:
    client = Client(ScriptedTokens(answer("tool_search", '{"query":"pages","limit":2}')))
    body = (await respond(client, tools=[SEARCH])).json
    Response.model_validate(body)
    assert "// Finds the team's tools.\ntype tool_search = (_: {" in client.prompt
    thought, called = body["output"]
    assert (called["type"], called["execution"]) == ("tool_search_call", "client")
    assert called["arguments"] == {"query": "pages", "limit": 2}
    result = {"type": "tool_search_output", "call_id": called["call_id"], "status": None, "tools": FOUND}
    other = Client(ScriptedTokens(answer("tool_search", "{}").replace("functions.tool_search", "wiki.get")))
    made = (await respond(other, tools=[SEARCH], input=[HI, thought, called, result, called, result])).json
    written = other.prompt
    assert written.count("namespace wiki {\n\ntype get =") == 1
    assert "Found: wiki.get" in written.partition("functions.tool_search to=assistant")[2]
    wanted = {"type": "function_call", "namespace": "wiki", "name": "get"}
    assert made["output"][-1].items() >= wanted.items()
    output = {"type": "function_call_output", "call_id": made["output"][-1]["call_id"], "output": "A page."}
    sent = {"input": [output], "previous_response_id": made["id"]}
    for tools in ([SEARCH], [SEARCH, *FOUND]):
        await respond(other, tools=tools, **sent)
        assert other.prompt.count("namespace wiki {\n\ntype get =") == 1


@pytest.mark.parametrize(
    "arguments", ['{"command": 1}', '{"commands":["a"],"x":' + "[" * 3000 + "]" * 3000 + "}"]
)
def test_arguments_that_do_not_fit_are_output_as_a_function_call(arguments: str) -> None:
    item = machine_call("shell", "call_1", arguments)
    assert isinstance(item, FunctionCallItem)
    assert (item.name, item.arguments, item.status) == ("shell", arguments, "completed")
