"""From `response_format`, `tool_choice` and strict tools to the form that a request carries."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.messages import GenerateRequest, Guided, MessageForm
from frontend.harmony.conversation import AnswerFormat, Tool
from frontend.turn.request import MAX_SCHEMA_BYTES, guided
from tests.scripted_frontend import BODIES, CONTEXT_LENGTH, MODEL, Client, Reply, ScriptedTokens

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
FREE_HEADERS = {"analysis": "<|channel|>analysis<|message|>", "preamble": "<|channel|>commentary<|message|>"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def tool(name: str, **fields: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> Json:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [CUSTOM if name == "c" else named(name) for name in names]},
    }


async def send(path: str = CHAT, **fields: Any) -> tuple[Reply, list[GenerateRequest]]:
    """The reply of a frontend whose model calls `f`, and the requests of its worker."""
    tokens = ScriptedTokens(CALL)
    return await Client(tokens).post(path, {"model": MODEL, **BODIES[path], **fields}), tokens.requests


async def form_of(**fields: Any) -> Guided | None:
    reply, requests = await send(**fields)
    assert reply.status == 200, reply.json
    return requests[0].sampling.guided


async def demanded(**fields: Any) -> Guided:
    form = await form_of(**fields)
    assert form is not None
    return form


def called(form: Guided) -> dict[str, MessageForm]:
    """The tools that may be called, with the form of the call."""
    calls = [message for message in form.last if message.end == "<|call|>"]
    return {message.headers[0].partition("functions.")[2].partition(" ")[0]: message for message in calls}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"tools": [tool("f")]},
        {"tools": [tool("f")], "tool_choice": "auto"},
        {"tools": [tool("f", strict=True)], "tool_choice": "none"},
        {"guided_json": None, "structured_outputs": {}},
    ],
)
async def test_nothing_demanded_is_nothing_enforced(fields: Json) -> None:
    assert await form_of(**fields) is None


FREE = None
STRICT = (SCHEMA, False)
LOOSE = (SCHEMA, True)
OBJECT = ({"type": "object"}, True)
F, G, STRICT_F = tool("f"), tool("g"), tool("f", strict=True)
CUSTOM: Json = {"type": "custom", "custom": {"name": "c"}}
FINAL_HEADERS = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")


def held(message: MessageForm) -> tuple[Json, bool] | None:
    """The schema of a message, and whether keywords that cannot be enforced are ignored."""
    return None if message.grammar is None else (json.loads(message.grammar), message.lenient)


@pytest.mark.parametrize(
    ("fields", "calls", "answers"),
    [
        ({"response_format": NAMED_SCHEMA}, {}, [STRICT]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
         {}, [LOOSE]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, {}, [OBJECT]),
        ({"response_format": {"type": "json_object"}}, {}, [OBJECT]),
        ({"response_format": NAMED_SCHEMA, "tools": [STRICT_F], "tool_choice": "none"}, {}, [STRICT]),
        ({"response_format": NAMED_SCHEMA, "tools": [F]}, {"f": FREE}, [STRICT]),
        ({"response_format": NAMED_SCHEMA, "tools": [F], "tool_choice": "required"}, {"f": LOOSE}, []),
        ({"tools": [F, G], "tool_choice": "required"}, {"f": LOOSE, "g": LOOSE}, []),
        ({"tools": [F, G], "tool_choice": named("g")}, {"g": LOOSE}, []),
        ({"tools": [F, CUSTOM], "tool_choice": allowed("required", "f", "c")}, {"f": LOOSE, "c": FREE}, []),
        ({"tools": [STRICT_F], "tool_choice": "required"}, {"f": STRICT}, []),
        ({"tools": [CUSTOM], "tool_choice": "required"}, {"c": FREE}, []),
        ({"tools": [F, CUSTOM], "tool_choice": CUSTOM}, {"c": FREE}, []),
        ({"tools": [F, G], "tool_choice": allowed("auto", "g")}, {"g": FREE}, [FREE]),
        ({"tools": [STRICT_F, G]}, {"f": STRICT, "g": FREE}, [FREE]),
    ],
)  # fmt: skip
async def test_what_may_come_after_thinking(fields: Json, calls: Json, answers: list[object]) -> None:
    form = await demanded(**fields)
    assert {name: held(message) for name, message in called(form).items()} == calls
    answered = [message for message in form.last if message.end == "<|return|>"]
    assert [held(message) for message in answered] == answers
    final = FINAL_HEADERS[:1] if answers == [FREE] else FINAL_HEADERS
    assert [message.headers for message in answered] == [final] * len(answered)
    # Neither a second thought nor a preamble may evade what is demanded.
    assert form.leads_once == (answers != [FREE])
    headers = list(FREE_HEADERS.values())
    assert [message.headers[0] for message in form.leading] == (headers[:1] if form.leads_once else headers)
    assert {message.grammar for message in form.leading} == {None}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
async def test_arguments_are_an_object_whatever_the_schema_says(parameters: Json | None) -> None:
    form = await demanded(tools=[tool("f", parameters=parameters)], tool_choice="required")
    assert json.loads(called(form)["f"].grammar or "")["type"] == "object"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": named("h"), "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": allowed("auto", "h"), "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": {"type": "hosted"}, "tools": [tool("f")]}, "tool_choice.type"),
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
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"a":' * 5000}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": f"start: /{'a' * MAX_SCHEMA_BYTES}/"}, "guided_grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_cannot_be_demanded_is_a_400_that_names_it(fields: Json, param: str) -> None:
    reply, requests = await send(**fields)
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


@pytest.mark.parametrize("num_nested", [5_000, 100_000])
def test_a_schema_that_json_cannot_encode_is_refused_by_its_field(num_nested: int) -> None:
    schema: object = {}
    for _ in range(num_nested):
        schema = {"not": schema}
    with pytest.raises(InvalidRequest) as refused:
        guided([], None, AnswerFormat(schema=schema, path="response_format"))
    assert refused.value.param == "response_format"


async def test_what_can_never_be_served_is_refused_although_the_workers_are_full() -> None:
    client = Client(ScriptedTokens("", refuses_with=Overloaded("Full.")))
    long = {"messages": [{"role": "user", "content": "x" * CONTEXT_LENGTH}]}
    never: list[Json] = [{"guided_choice": ["b"]}, {"min_tokens": 10**6}, {"stop_token_ids": [10**6]}, long]
    statuses = [(await client.chat(guided_regex="a", **more)).status for more in ({}, *never)]
    assert statuses == [429, 400, 400, 400, 400]


FORMS = [
    ({"guided_json": SCHEMA}, "guided_json", "json_schema", json.dumps(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, "guided_json", "json_schema", json.dumps(SCHEMA)),
    ({"guided_regex": "[ab]+"}, "guided_regex", "regex", "[ab]+"),
    ({"guided_choice": ["yes", "no. (1)"]}, "guided_choice", "regex", r"yes|no\. \(1\)"),
    ({"guided_grammar": "start: /a/"}, "guided_grammar", "lark", "start: /a/"),
    ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "ebnf", 'root ::= "a"'),
    ({"nvext": {"guided_regex": "a"}}, "nvext.guided_regex", "regex", "a"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", "json_schema", json.dumps(SCHEMA)),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", "regex", "a|b"),
    ({"structured_outputs": {"grammar": "start: A"}}, "structured_outputs.grammar", "lark", "start: A"),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(("fields", "param", "syntax", "grammar"), FORMS)
async def test_a_form_is_demanded_under_any_name(
    path: str, fields: Json, param: str, syntax: str, grammar: str
) -> None:
    reply, requests = await send(path, **fields)
    assert (reply.status, reply.headers.get("x-baton-ignored")) == (200, None), reply.body
    form = requests[0].sampling.guided
    assert form is not None
    last: MessageForm = form.last[-1]
    assert (last.param, last.syntax, last.end) == (param, syntax, "<|return|>")
    if syntax == "json_schema":
        assert json.loads(last.grammar or "") == json.loads(grammar)
    else:
        assert last.grammar == grammar
    is_raw = path == "/v1/completions"
    assert last.headers[0] == ("" if is_raw else "<|channel|>final<|message|>")
    assert bool(form.leading) is not is_raw
