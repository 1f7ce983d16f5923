"""Codex's tools in Responses: namespaces, custom tools; and thoughts as summaries and under a seal."""

import json
import re
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.responses.input import InputReader
from frontend.responses.items import OutputText, ReasoningItem
from frontend.turn.seal import Seal
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


async def respond(client: Client, **fields: Any) -> Reply:
    reply = await client.post("/v1/responses", {"model": MODEL, "input": [HI], **fields})
    assert reply.status == 200, reply.body
    return reply


async def output(text: str, **fields: Any) -> list[Json]:
    """The items of an answer, told the same whole and as a stream."""
    whole = (await respond(Client(ScriptedTokens(text)), **fields)).json["output"]
    events = (await respond(Client(ScriptedTokens(text)), stream=True, **fields)).events
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    for told in (whole, done):
        for item in told:
            item.pop("id")
            item.pop("call_id", None)
            item.pop("encrypted_content", None)
    assert done == whole
    return list(whole)


async def prompt(**fields: Any) -> str:
    client = Client(ScriptedTokens("<|channel|>final<|message|>Ok<|return|>"))
    await respond(client, **fields)
    return TOKENIZER.decode(client.tokens.requests[-1].token_ids)


async def test_a_namespace_is_shown_as_one_and_its_calls_carry_name_and_namespace_apart() -> None:
    said = await prompt(tools=[AGENTS, CLOSE])
    assert "## agents\n\n// Sub-agents.\nnamespace agents {\n\ntype close" in said
    assert "} // namespace agents" in said
    assert "namespace functions {\n\ntype close" in said
    (_, called) = await output(call("agents.close", "{}"), tools=[AGENTS, CLOSE])
    assert (called["type"], called["name"], called["namespace"]) == ("function_call", "close", "agents")
    (_, called) = await output(call("functions.close", "{}"), tools=[AGENTS, CLOSE])
    assert (called["name"], "namespace" in called) == ("close", False)


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        ({"type": "function", "name": "close"}, "functions.close"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents.close"),
        ({"type": "function", "name": "agents.close"}, "agents.close"),
        ({"type": "function", "name": "send"}, "agents.send"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "send"}]},
            "agents.send",
        ),
    ],
)
async def test_a_choice_finds_a_function_in_its_namespace(choice: Json, called: str) -> None:
    client = Client(ScriptedTokens(THINK))
    agents = AGENTS | {"tools": [CLOSE, CLOSE | {"name": "send"}]}
    reply = await respond(client, tools=[agents, CLOSE], tool_choice=choice)
    assert reply.json["tool_choice"] == choice
    form = client.tokens.requests[-1].sampling.guided
    assert form is not None
    recipients = {header.partition(" to=")[2] for message in form.last for header in message.headers}
    assert {re.split("[ <]", recipient)[0] for recipient in recipients} == {called}


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ("*** Begin Patch", "*** Begin Patch"),
        (json.dumps({"input": "*** Begin\nPatch"}), "*** Begin\nPatch"),
        (json.dumps({"other": 1}), json.dumps({"other": 1})),
    ],
)
async def test_a_custom_tool_takes_text_also_where_the_model_wrote_json(body: str, given: str) -> None:
    assert "type patch = (input: string) => any;" in await prompt(tools=[PATCH])
    (_, called) = await output(call("functions.patch", body, " code"), tools=[PATCH])
    assert (called["type"], called["name"], called["input"]) == ("custom_tool_call", "patch", given)


async def test_the_events_of_a_custom_call_are_openais() -> None:
    client = Client(ScriptedTokens(call("functions.patch", "*** Begin", " code")))
    events = (await respond(client, tools=[PATCH], stream=True)).events
    told = [event for event in events if "custom" in event["type"]]
    kinds = [event["type"] for event in told]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert [told[0]["delta"], told[1]["input"]] == ["*** Begin"] * 2


def items_of(given: list[Json]) -> list[Any]:
    return InputReader(given, Seal(b"key"), lambda _: "Remembered.").items


@pytest.mark.parametrize(
    ("item", "prefix"),
    [
        ({"role": "user", "content": "Hi"}, "msg"),
        ({"type": "reasoning", "content": []}, "rs"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, "fc"),
        ({"type": "function_call_output", "call_id": "c", "output": "ok"}, "fco"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}, "ctc"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}, "ctco"),
        ({"type": "local_shell_call_output", "call_id": "c", "output": "ok"}, "item"),
    ],
)
def test_an_input_item_keeps_its_id_or_gets_one(item: Json, prefix: str) -> None:
    [made, named] = items_of([item, {**item, "id": "x"}])
    assert made.id.startswith(f"{prefix}_")
    assert named.id == "x"


def test_a_refusal_of_an_earlier_answer_is_its_text() -> None:
    said: Json = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    [message] = items_of([said])
    assert message.content == [OutputText(text="No.")]
    with pytest.raises(InvalidRequest, match="refusal"):
        items_of([said | {"content": [{"type": "refusal", "text": "No."}]}])


def test_reasoning_that_is_sent_back_counts_more_than_what_is_remembered() -> None:
    sent: Json = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "Sent."}]}
    read = items_of([sent, sent | {"content": []}, sent | {"content": [], "id": None}])
    texts = [[part.text for part in item.content] for item in read if isinstance(item, ReasoningItem)]
    assert texts == [["Sent."], ["Remembered."], []]


async def test_tools_among_the_input_are_offered() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, CLOSE]}
    left_out = [{"type": kind} for kind in ("compaction_summary", "configuration_update", "program")]
    said = await prompt(input=[added, *left_out, HI], tools=[PATCH], reasoning={"context": "all_turns"})
    assert said == await prompt(input=[HI], tools=[PATCH, AGENTS, CLOSE])
    (_, called) = await output(call("agents.close", "{}"), input=[added, HI])
    assert (called["name"], called["namespace"]) == ("close", "agents")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (None, "input[1].tools"),
        ([{"type": "function"}], "input[1].tools[0].name"),
        ([{"type": 1}], "input[1].tools[0].type"),
    ],
)
async def test_a_mistake_in_tools_among_the_input_is_named(tools: Any, param: str) -> None:
    items = [HI, {"type": "additional_tools", "tools": tools}]
    body = {"model": MODEL, "input": items}
    reply = await Client(ScriptedTokens(THINK)).post("/v1/responses", body)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_tool_of_openais_servers_is_refused_only_where_it_is_demanded() -> None:
    client = Client(ScriptedTokens(THINK))
    body = {"model": MODEL, "input": "Hi", "tools": [{"type": "web_search"}]}
    reply = await client.post("/v1/responses", {**body, "tool_choice": {"type": "web_search"}})
    assert (reply.status, reply.error["param"]) == (400, "tool_choice.type")
    required = await client.post("/v1/responses", {**body, "tool_choice": "required"})
    assert (required.status, required.error["param"]) == (400, "tool_choice")
    hosted = [{"type": "web_search"}, {"type": "computer_use_preview", "environment": "browser"}]
    ignored = (await respond(client, tools=hosted)).headers["x-baton-ignored"]
    assert ignored == "tools[].web_search, tools[].computer_use_preview"


@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(syntax: str) -> None:
    client = Client(ScriptedTokens(call("functions.patch", '{"input": "a"}', " code")))
    grammar = {"type": "grammar", "syntax": syntax, "definition": "start: /a/"}
    (_, called) = (await respond(client, tools=[PATCH | {"format": grammar}])).json["output"]
    assert called["input"] == '{"input": "a"}', "what a grammar allowed is the input itself"
    form = client.tokens.requests[0].sampling.guided
    assert form is not None
    assert (form.last[0].syntax, form.last[0].grammar) == (syntax, "start: /a/")
    assert form.last[0].param == "tools[0].format.definition"


async def test_input_tokens_are_counted_as_they_would_be_asked() -> None:
    client = Client(ScriptedTokens(call("functions.close", "{}")))
    fields: Json = {"tools": [CLOSE, PATCH], "instructions": "Be brief."}
    used = (await respond(client, **fields)).json["usage"]["input_tokens"]
    body = {"model": MODEL, "input": [HI], **fields}
    reply = await client.post("/v1/responses/input_tokens", body)
    assert (reply.status, reply.json) == (200, {"object": "response.input_tokens", "input_tokens": used})
    small = Client(ScriptedTokens(""), max_body_bytes=100)
    assert (await small.post("/v1/responses/input_tokens", body)).status == 413


@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD"])
async def test_input_tokens_is_no_response_id(method: str) -> None:
    client = Client(ScriptedTokens(""))
    reply = await client.request(method, "/v1/responses/input_tokens", b"")
    assert (reply.status, reply.error["code"]) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_reasoning_is_given_as_summary_where_that_is_asked_for(summary: str) -> None:
    text = THINK + "<|channel|>final<|message|>Ok<|return|>"
    thought, _ = await output(text, reasoning={"summary": summary})
    assert thought["summary"] == [{"type": "summary_text", "text": "Think."}]
    assert thought["content"] == []
    events = (await respond(Client(ScriptedTokens(text)), stream=True, reasoning={"summary": summary})).events
    kinds = list(dict.fromkeys(event["type"] for event in events if "summary" in event["type"]))
    assert kinds == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]


async def test_frontends_that_share_a_key_open_each_others_thoughts_if_unchanged() -> None:
    one, same, other = (Client(ScriptedTokens(call("functions.close", "{}")), key=key) for key in KEYS)
    include: Json = {"include": ["reasoning.encrypted_content"], "tools": [CLOSE]}
    thought, called = (await respond(one, reasoning={"summary": "auto"}, **include)).json["output"]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "ok"}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    for client, is_known in ((same, True), (other, False)):
        reply = await respond(client, input=[HI, sealed, called, result], **include)
        assert ("Think." in TOKENIZER.decode(client.tokens.requests[-1].token_ids)) is is_known
        assert ("encrypted_content" in reply.headers.get("x-baton-ignored", "")) is not is_known
    sealed["encrypted_content"] = thought["encrypted_content"][:-4] + "AAAA"
    body = {"model": MODEL, "input": [HI, sealed, called, result], **include}
    refused = await same.post("/v1/responses", body)
    assert (refused.status, refused.error["param"]) == (400, "input[1].encrypted_content")


@pytest.mark.parametrize(
    ("called", "recipient"),
    [
        (
            {"type": "function_call", "name": "close", "namespace": "agents", "arguments": "{}"},
            "agents.close",
        ),
        ({"type": "custom_tool_call", "name": "patch", "input": "*** Begin"}, "functions.patch"),
    ],
)
async def test_a_call_comes_back_as_it_was(called: Json, recipient: str) -> None:
    result = {"type": f"{called['type']}_output", "call_id": "c", "output": "done"}
    said = await prompt(tools=[AGENTS, PATCH], input=[HI, called | {"call_id": "c"}, result])
    assert f"assistant to={recipient}" in said
    assert f"{recipient} to=assistantcommentarydone" in said
