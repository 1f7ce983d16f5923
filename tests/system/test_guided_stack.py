"""Forms are enforced end to end at temperature 1, with prefill and decode on two workers."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S

Json = dict[str, Any]

SEEDS = range(4)
QUESTION = [{"role": "user", "content": "Is everything up and running?"}]
# The demo model has seen JSON only in arguments: it may write unbounded values (strings, digits) until its
# tokens run out, and a cut answer is not JSON. So all but one schema have bounds.
MAX_TOKENS = 400
REPORT: Json = {
    "type": "object",
    "properties": {
        "status": {"enum": ["ok", "degraded", "down"]},
        "uptime_days": {"type": "integer", "minimum": 0, "maximum": 999},
        "load": {"enum": [0.25, 0.5, 1]},
        "note": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
        "disks": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^sd[a-z]$"},
                    "full": {"type": "boolean"},
                },
                "required": ["name", "full"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["status", "uptime_days", "load", "note", "disks"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
HEALTH = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_system_health", "parameters": HEALTH}},
]
ONLY_HEALTH = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_system_health"}}]}
PARAMETERS: dict[str, Json] = {"get_weather": WEATHER, "get_system_health": HEALTH}


def ask(stack: Stack, **fields: Any) -> Json:
    """The first choice of an answer at temperature 1."""
    body = {"messages": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 1, **fields}
    choice: Json = stack.answer("/v1/chat/completions", **body)["choices"][0]
    return choice


def ask_all(stack: Stack, *, min_complete: int = len(SEEDS) // 2, **fields: Any) -> list[Json]:
    """One answer for each seed, all at once; only those that were not cut."""
    with ThreadPoolExecutor(len(SEEDS)) as threads:
        choices = list(threads.map(lambda seed: ask(stack, seed=seed, **fields), SEEDS))
    complete = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert len(complete) >= min_complete
    return complete


def check_arguments(call: Json) -> None:
    """They validate."""
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, PARAMETERS[call["function"]["name"]])


def json_schema(schema: Json, *, strict: bool) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "report", "schema": schema, "strict": strict}}


@pytest.mark.parametrize("strict", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_answer_validates_against_its_schema(stack: Stack, strict: bool) -> None:
    for choice in ask_all(stack, response_format=json_schema(REPORT, strict=strict)):
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), REPORT)


def test_a_json_object_is_one(stack: Stack) -> None:
    form = {"type": "json_object"}
    for choice in ask_all(stack, min_complete=1, response_format=form, frequency_penalty=1):
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("tool_choice", "expected"),
    [
        ("required", {"get_weather", "get_system_health"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "allowed_tools", "allowed_tools": ONLY_HEALTH}, {"get_system_health"}),
    ],
    ids=["required", "named", "allowed"],
)
def test_a_demanded_call_is_made_with_valid_arguments(
    stack: Stack, tool_choice: object, expected: set[str]
) -> None:
    for choice in ask_all(stack, tools=TOOLS, tool_choice=tool_choice):
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] in expected
        check_arguments(call)


def test_strict_tools_stay_a_choice_and_their_arguments_are_valid(stack: Stack) -> None:
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for choice in ask_all(stack, tools=strict):
        for call in choice["message"].get("tool_calls") or ():
            check_arguments(call)


@pytest.mark.slow
def test_a_form_survives_the_worker_that_held_to_it(tmp_path: Path) -> None:
    """Two streams, one on each decode worker; one worker is killed, and both streams continue unchanged."""
    disk = REPORT["properties"]["disks"]["items"]
    schema = {"type": "array", "items": disk, "minItems": 12, "maxItems": 12}
    fields: Json = {"seed": 5, "response_format": json_schema(schema, strict=True), "max_tokens": 600}
    with Stack(tmp_path) as stack:
        _, doomed, _ = stack.serve("prefill", "decode", "decode", engine="embedded")
        expected = ask(stack, **fields)["message"]["content"]
        jsonschema.validate(json.loads(expected), schema)
        body = {"model": MODEL, "messages": QUESTION, "temperature": 1, "stream": True, **fields}
        with ExitStack() as streams:
            lines = [
                streams.enter_context(
                    httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
                ).iter_lines()
                for _ in range(2)
            ]
            begun = [[next(stream) for _ in range(40)] for stream in lines]
            doomed.kill()
            answers = [content_of([*head, *rest]) for head, rest in zip(begun, lines, strict=True)]
        assert answers == [expected, expected]
        assert "retrying request_id" in stack.processes[0].text(), "no stream was resumed"


def content_of(lines: Iterable[str]) -> str:
    """The text of a stream's events."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_schema_that_cannot_be_enforced_is_a_400_with_the_reason(stack: Stack) -> None:
    form = json_schema({"type": "object", "not": {"required": ["a"]}}, strict=True)
    for stream in (False, True):
        reply = stack.post("/v1/chat/completions", messages=QUESTION, response_format=form, stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "response_format.json_schema.schema")
        assert "not" in error["message"]
