"""JSON schemas in the prompt where openai-harmony is no measure: depth, lone surrogates, odd values."""

from collections.abc import Callable

import pytest

from baton.errors import InvalidRequest
from frontend.harmony.conversation import AnswerFormat, Conversation, Tool
from frontend.harmony.render import MAX_DEPTH, render, type_of


def nested(around: Callable[[object], dict[str, object]], depth: int) -> object:
    schema: object = {}
    for _ in range(depth):
        schema = around(schema)
    return schema


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"type": "object", "properties": {"a": inner}},
        lambda inner: {"type": "object", "properties": {"a": {"oneOf": [inner]}}},
        lambda inner: {"oneOf": [inner]},
    ],
)
def test_a_schema_that_nests_too_deeply_is_refused(around: Callable[[object], dict[str, object]]) -> None:
    assert "any" in type_of(nested(around, MAX_DEPTH))
    schema = nested(around, MAX_DEPTH + 1)
    with pytest.raises(InvalidRequest, match="nested deeper") as refused:
        render(Conversation(turns=(), tools=(Tool(name="f", parameters=schema, path="tools[0]"),)))
    assert refused.value.param == "tools[0].parameters"


@pytest.mark.parametrize("leaf", [{}, {"\ud800": 1}])
def test_a_value_that_nests_too_deeply_is_refused(leaf: object) -> None:
    value = leaf
    for _ in range(10_000):
        value = [value]
    parameters = {"type": "object", "properties": {"a": {"type": "array", "default": value}}}
    for conversation, param in (
        (Conversation(turns=(), tools=(Tool(name="f", parameters=parameters),)), "tools.parameters"),
        (Conversation(turns=(), answer_format=AnswerFormat(name="answer", schema=value)), "response_format"),
    ):
        with pytest.raises(InvalidRequest, match="nested too deeply") as refused:
            render(conversation)
        assert refused.value.param == param


def test_lone_surrogates_in_a_schema_do_no_harm() -> None:
    schema = {"type": "object", "properties": {"a\ud800": {"type": "array", "default": ["\udfff"]}}}
    assert 'a\ud800?: Array<any>, // default: ["\udfff"]' in type_of(schema)


@pytest.mark.parametrize("enum", [["d"], ["a", "b"]])
def test_a_default_that_names_an_enum_value_is_not_quoted(enum: object) -> None:
    def line(**fields: object) -> str:
        return type_of({"type": "object", "properties": {"a": {"type": "string", "default": "d", **fields}}})

    assert line(enum=enum).endswith(", // default: d\n}")
    assert line().endswith(', // default: "d"\n}')
    others: list[object] = [[], "d", {"d": 1}, None]
    for other in others:
        assert line(enum=other).endswith(', // default: "d"\n}')


@pytest.mark.parametrize(
    "parameters",
    [
        *(None, {}, [], "x", 3, {"type": {}}, {"type": [{}]}, {"oneOf": "x"}),
        *({"type": "object", "properties": odd} for odd in (None, [1], "x", {"a": 3})),
        {"type": "object", "properties": {"a": {}}, "required": 3},
    ],
)
def test_odd_parameters_are_rendered_somehow(parameters: object) -> None:
    assert any(
        "type f = (" in str(segment)
        for segment in render(Conversation(turns=(), tools=(Tool(name="f", parameters=parameters),)))
    )
