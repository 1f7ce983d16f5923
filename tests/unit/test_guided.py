"""From `response_format`, `tool_choice` and strict tools to the form that a request carries."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, MessageForm
from frontend.harmony.conversation import AnswerFormat, Tool
from frontend.turn.request import MAX_SCHEMA_BYTES, CallChoice, guided
from tests.scripted_frontend import TOKENIZER, Client, Reply, ScriptedTokens

Json = dict[str, Any]

CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
FREE_HEADERS = {"analysis": "<|channel|>analysis<|message|>", "preamble": "<|channel|>commentary<|message|>"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = SCHEMA | {"additionalProperties": False}  # as strict ones are
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def tool(name: str, **fields: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Json:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


def send(**fields: Any) -> tuple[Reply, list[GenerateRequest]]:
    """The reply of a frontend whose model calls `f`, and what its worker was asked."""
    tokens = ScriptedTokens(CALL)
    return asyncio.run(Client(tokens).chat(**fields)), tokens.requests


def form_of(**fields: Any) -> Guided | None:
    reply, requests = send(**fields)
    assert reply.status == 200, reply.json
    return requests[0].sampling.guided


def demanded(**fields: Any) -> Guided:
    form = form_of(**fields)
    assert form is not None
    return form


def called(form: Guided) -> dict[str, MessageForm]:
    """The tools that may be called, with the form of the call."""
    calls = [message for message in form.last if message.end == "<|call|>"]
    return {message.headers[0].partition("functions.")[2].partition(" ")[0]: message for message in calls}


def finals(form: Guided) -> list[MessageForm]:
    return [message for message in form.last if message.end == "<|return|>"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool("f")]},
        {"tools": [tool("f")], "tool_choice": "auto"},
        {"tools": [tool("f", strict=True)], "tool_choice": "none"},
    ],
)
def test_nothing_demanded_is_nothing_enforced(fields: Json) -> None:
    assert form_of(**fields) is None


def test_a_schema_is_the_form_of_the_final_message_and_thinking_is_free() -> None:
    form = demanded(response_format=NAMED_SCHEMA)
    assert [message.headers for message in form.leading] == [(FREE_HEADERS["analysis"],)]
    assert form.leading[0].grammar is None
    [final] = form.last
    assert (json.loads(final.grammar or ""), final.lenient) == (CLOSED, False)
    assert final.param == "response_format.json_schema.schema"
    assert final.headers == (
        "<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>",
    )  # fmt: skip


def test_with_tool_choice_none_a_demanded_form_has_no_calls() -> None:
    tools = [tool("f", strict=True)]
    form = demanded(response_format=NAMED_SCHEMA, tools=tools, tool_choice="none")
    assert form == demanded(response_format=NAMED_SCHEMA)


def test_a_schema_that_is_not_strict_is_enforced_as_far_as_it_goes() -> None:
    loose = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert demanded(response_format=loose).last[0].lenient


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "json_object"}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema.schema"),
    ],
)
def test_without_a_schema_the_answer_is_any_object(response_format: Json, param: str) -> None:
    [final] = demanded(response_format=response_format).last
    assert (json.loads(final.grammar or ""), final.param) == ({"type": "object"}, param)


def test_the_prompt_shows_the_schema_with_its_description() -> None:
    described = msgspec.json.decode(msgspec.json.encode(NAMED_SCHEMA))
    described["json_schema"]["description"] = "What it is."
    _, [request] = send(response_format=described)
    prompt = TOKENIZER.decode(request.token_ids)
    assert '# Response Formats\n\n## n\n\n{"description":"What it is.","type":"object"' in prompt
    _, [request] = send(response_format={"type": "json_object"})
    assert "# Response Formats" not in TOKENIZER.decode(request.token_ids)


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"f", "g"}),
        (named("g"), {"g"}),
        (allowed("required", "f"), {"f"}),
    ],
)
def test_a_demanded_call_is_all_that_may_come_after_thinking(tool_choice: object, names: set[str]) -> None:
    form = demanded(tools=[tool("f"), tool("g")], tool_choice=tool_choice)
    assert set(called(form)) == names
    assert not finals(form)
    assert len(form.leading) == 1
    assert all(json.loads(message.grammar or "") == SCHEMA for message in form.last)


def test_what_is_demanded_is_not_put_off_by_thinking_again() -> None:
    assert demanded(tools=[tool("f")], tool_choice="required").leads_once
    assert demanded(response_format={"type": "json_object"}).leads_once
    assert not demanded(tools=[tool("f", strict=True)]).leads_once


def test_a_demanded_call_wins_over_the_form_of_the_answer() -> None:
    form = demanded(tools=[tool("f")], tool_choice="required", response_format=NAMED_SCHEMA)
    assert not finals(form)


def test_tools_that_are_merely_allowed_leave_the_answer_free() -> None:
    form = demanded(tools=[tool("f"), tool("g")], tool_choice=allowed("auto", "g"))
    assert {name: message.grammar for name, message in called(form).items()} == {"g": None}
    assert [final.grammar for final in finals(form)] == [None]
    assert [message.headers[0] for message in form.leading] == list(FREE_HEADERS.values())


def test_strict_tools_are_held_to_their_schema_and_others_are_not() -> None:
    form = demanded(tools=[tool("f", strict=True), tool("g")])
    calls = called(form)
    assert json.loads(calls["f"].grammar or "") == CLOSED
    assert (calls["f"].param, calls["f"].lenient) == ("tools[0].function.parameters", False)
    assert calls["g"].grammar is None
    assert [final.grammar for final in finals(form)] == [None]


def test_with_tools_an_answer_in_a_form_may_still_be_a_call() -> None:
    form = demanded(tools=[tool("f")], response_format=NAMED_SCHEMA)
    assert set(called(form)) == {"f"}
    assert json.loads(finals(form)[0].grammar or "") == CLOSED
    assert len(form.leading) == 1, "a preamble would be text beside the JSON"


def test_calls_may_be_written_in_every_way_the_model_writes_them() -> None:
    headers = called(demanded(tools=[tool("f")], tool_choice="required"))["f"].headers
    assert {
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>analysis to=functions.f<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    } <= set(headers)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_arguments_are_an_object_whatever_the_schema_says(parameters: Json | None) -> None:
    form = demanded(tools=[tool("f", parameters=parameters)], tool_choice="required")
    assert json.loads(called(form)["f"].grammar or "")["type"] == "object"


def test_a_demanded_call_finishes_as_tool_calls() -> None:
    reply, _ = send(tools=[tool("f")], tool_choice=named("f"))
    [choice] = reply.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": named("h"), "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": allowed("auto", "h"), "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": {"type": "hosted"}, "tools": [tool("f")]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [tool("f")]}, "tool_choice.function"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (
            {"tools": [tool("f", parameters={"const": "x" * MAX_SCHEMA_BYTES})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_demanded_is_a_400_that_names_it(fields: Json, param: str) -> None:
    reply, requests = send(**fields)
    assert (reply.status, reply.error["param"], requests) == (400, param, [])


FREE_BYTES = len(json.dumps({"type": "object", "description": ""}, separators=(",", ":")))


def schema_of(num_bytes: int) -> dict[str, str]:
    """A schema of this length as JSON."""
    return {"type": "object", "description": "x" * (num_bytes - FREE_BYTES)}


def strict(name: str, num_bytes: int) -> Tool:
    return Tool(name=name, parameters=schema_of(num_bytes), strict=True, path=name)


def test_the_schemas_of_a_request_have_128_kib_together() -> None:
    assert guided([], None, AnswerFormat(schema=schema_of(MAX_SCHEMA_BYTES)))
    assert guided([strict("a", 64 << 10), strict("b", 64 << 10)])
    with pytest.raises(InvalidRequest):
        guided([], None, AnswerFormat(schema=schema_of(MAX_SCHEMA_BYTES + 1)))
    with pytest.raises(InvalidRequest) as refused:
        guided([strict("a", 64 << 10), strict("b", (64 << 10) + 1)])
    assert refused.value.param == "b.parameters"


@pytest.mark.parametrize(
    ("tools", "choice", "says"),
    [
        ([Tool(name="f")], CallChoice(names=frozenset()), "names no tool"),
        ([Tool(name="f")], CallChoice(names=frozenset({"f", "g"})), "'g', which is not in"),
        ([], CallChoice(must_call=True), "`tools` is empty"),
    ],
)
def test_a_choice_of_no_tool_is_refused(tools: list[Tool], choice: CallChoice, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        guided(tools, choice)


@pytest.mark.parametrize("num_nested", [5_000, 100_000, 0])
def test_a_schema_that_json_cannot_encode_is_refused_by_its_field(num_nested: int) -> None:
    schema: object = {"description": "\ud800"}
    for _ in range(num_nested):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest) as refused:
        guided([], None, AnswerFormat(schema=schema, path="response_format"))
    assert refused.value.param == "response_format"


def test_a_demanded_call_of_a_free_text_tool_may_be_any_text() -> None:
    form = guided([Tool(name="f", takes_text=True)], CallChoice(must_call=True))
    assert form is not None
    assert form.last[0].grammar is None


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_demanded_call_is_as_strict_as_its_tool(is_strict: bool) -> None:
    form = guided([Tool(name="f", parameters=schema_of(100), strict=is_strict)], CallChoice(must_call=True))
    assert form is not None
    assert form.last[0].lenient is not is_strict


def test_the_form_crosses_the_wire() -> None:
    _, [request] = send(tools=[tool("f", strict=True)], response_format=NAMED_SCHEMA)
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=GenerateRequest) == request
    form = guided([Tool(name="f", strict=True)])
    assert hash(form) == hash(guided([Tool(name="f", strict=True)])), "engines keep compiled forms by it"
