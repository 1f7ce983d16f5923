"""Other servers' names for an answer's form: one form in every API, or a refusal by name."""

import json
from typing import Any

import pytest

from baton.messages import MessageForm
from frontend.turn.form import closed
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens

Json = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}
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
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "json_schema",
     '{"type": "object"}'),
    ({"regex": "a|b"}, "regex", "regex", "a|b"),
    ({"ebnf": 'root ::= "b"'}, "ebnf", "ebnf", 'root ::= "b"'),
]  # fmt: skip


async def ask(path: str, **fields: Any) -> tuple[Reply, ScriptedTokens]:
    tokens = ScriptedTokens("<|channel|>final<|message|>ok<|return|>")
    return (await Client(tokens).post(path, {"model": MODEL, **BODIES[path], **fields})), tokens


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "param", "syntax", "grammar"), FORMS)
async def test_a_form_is_demanded_under_any_name(
    path: str, fields: Json, param: str, syntax: str, grammar: str
) -> None:
    reply, tokens = await ask(path, **fields)
    assert (reply.status, reply.headers.get("x-baton-ignored")) == (200, None), reply.body
    form = tokens.requests[0].sampling.guided
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": '{"a":' * 5000}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields: Json, param: str) -> None:
    reply, tokens = await ask("/v1/chat/completions", **fields)
    assert (reply.status, reply.error["param"], tokens.requests) == (400, param, [])


@pytest.mark.parametrize("path", BODIES)
async def test_a_grammar_that_is_too_large_is_refused(path: str) -> None:
    reply, tokens = await ask(path, guided_grammar="start: /" + "a" * (128 << 10) + "/")
    assert (reply.status, reply.error["param"], tokens.requests) == (400, "guided_grammar", [])


async def test_what_asks_for_nothing_is_neither_refused_nor_named() -> None:
    fields = {
        "bad_words": [],
        "continue_final_message": False,
        "add_generation_prompt": True,
        "guided_json": None,
        "guided_decoding_backend": "xgrammar",
        "structured_outputs": {"disable_fallback": True, "json_object": False},
    }
    reply, tokens = await ask("/v1/chat/completions", **fields)
    assert (reply.status, reply.headers.get("x-baton-ignored")) == (200, None)
    assert tokens.requests[0].sampling.guided is None


OPEN: Json = {"properties": {}}
CLOSED: Json = {"properties": {}, "additionalProperties": False}
UNCHANGED: list[Json] = [
    OPEN | {"additionalProperties": True},
    OPEN | {"unevaluatedProperties": True},
    OPEN | {"patternProperties": {"^a": {}}},
    {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}},
    {"const": OPEN},
    {"$defs": [], "anyOf": {}, "oneOf": None, "items": [OPEN]},
]


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "object"}, {"type": "object"}),
        (OPEN, CLOSED),
        ({"properties": None}, {"properties": None, "additionalProperties": False}),
        ({"properties": {"properties": {"type": "string"}}},
         {"properties": {"properties": {"type": "string"}}, "additionalProperties": False}),
        ({"items": {"properties": {"a": OPEN}}},
         {"items": {"properties": {"a": CLOSED}, "additionalProperties": False}}),
        ({"anyOf": [OPEN, True], "$defs": {"d": OPEN}}, {"anyOf": [CLOSED, True], "$defs": {"d": CLOSED}}),
        ({"prefixItems": [OPEN], "oneOf": [OPEN]}, {"prefixItems": [CLOSED], "oneOf": [CLOSED]}),
        ({"additionalProperties": OPEN, "patternProperties": {"^a": OPEN}, "definitions": {"d": OPEN}},
         {"additionalProperties": CLOSED, "patternProperties": {"^a": CLOSED}, "definitions": {"d": CLOSED}}),
        *((schema, schema) for schema in UNCHANGED),
    ],
)  # fmt: skip
def test_strict_closes_the_objects_that_list_their_properties(schema: Json, made: Json) -> None:
    assert closed(schema) == made
