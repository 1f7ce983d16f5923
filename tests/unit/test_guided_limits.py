"""The edges of what a client may demand of an answer's form: sizes, names, schemas that are none."""

import json

import msgspec
import pytest

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody
from frontend.chat.request import tools as tools_of
from frontend.harmony.conversation import AnswerFormat, Tool
from frontend.turn.request import CallChoice, guided

FREE_BYTES = len(json.dumps({"type": "object", "description": ""}, separators=(",", ":")))


def schema_of(num_bytes: int) -> dict[str, str]:
    """A schema that is so long as JSON."""
    return {"type": "object", "description": "x" * (num_bytes - FREE_BYTES)}


def strict(name: str, num_bytes: int) -> Tool:
    return Tool(name=name, parameters=schema_of(num_bytes), strict=True, path=name)


def test_the_schemas_of_a_request_have_128_kib_together() -> None:
    assert guided([], None, AnswerFormat(schema=schema_of(128 << 10)))
    assert guided([strict("a", 64 << 10), strict("b", 64 << 10)])
    with pytest.raises(InvalidRequest, match="131072 bytes"):
        guided([], None, AnswerFormat(schema=schema_of((128 << 10) + 1)))
    with pytest.raises(InvalidRequest, match="131072 bytes") as refused:
        guided([strict("a", 64 << 10), strict("b", (64 << 10) + 1)])
    assert refused.value.param == "b.parameters"


def test_a_tools_schema_is_named_by_its_place_in_the_body() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": schema_of(num_bytes)}}
        for name, num_bytes in (("a", 1000), ("b", 128 << 10))
    ]
    messages = [{"role": "user", "content": "x"}]
    body = msgspec.convert({"model": "m", "messages": messages, "tools": tools}, ChatBody)
    with pytest.raises(InvalidRequest) as refused:
        guided(tools_of(body.tools or ()))
    assert refused.value.param == "tools[1].function.parameters"


def test_a_choice_of_no_tool_is_refused() -> None:
    tools = [Tool(name="f")]
    with pytest.raises(InvalidRequest, match="names no tool"):
        guided(tools, CallChoice(names=frozenset()))
    with pytest.raises(InvalidRequest, match="'g', which is not in"):
        guided(tools, CallChoice(names=frozenset({"f", "g"})))
    with pytest.raises(InvalidRequest, match="`tools` is empty"):
        guided([], CallChoice(must_call=True))


def test_a_function_without_parameters_is_called_without_arguments() -> None:
    form = guided([Tool(name="f")], CallChoice(must_call=True))
    assert form is not None
    (call,) = form.last
    assert json.loads(call.grammar or "") == {"type": "object", "additionalProperties": False}


def test_arguments_are_an_object_even_if_the_schema_does_not_say_so() -> None:
    form = guided([Tool(name="f", parameters={"required": ["a"]}, strict=True)])
    assert form is not None
    assert json.loads(form.last[0].grammar or "") == {"type": "object", "required": ["a"]}


def test_a_schema_that_is_no_json_is_refused_by_its_field() -> None:
    deep: dict[str, object] = {}
    for _ in range(5_000):
        deep = {"not": deep}
    for schema in (deep, {"description": "\ud800"}):
        with pytest.raises(InvalidRequest, match="cannot be encoded as JSON") as refused:
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
