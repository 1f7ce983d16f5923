"""A chat body's fields: what bounds and steers the answer, what is refused, what has no effect. No HTTP."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody, turn_request
from frontend.http.body import decode
from frontend.turn.request import TurnRequest

HI = {"role": "user", "content": "Hi"}
F = {"type": "function", "function": {"name": "f"}}
C = {"type": "custom", "custom": {"name": "c"}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def decoded(**fields: Any) -> tuple[ChatBody, tuple[str, ...]]:
    return decode(json.dumps({"model": "m", "messages": [HI], **fields}).encode(), ChatBody)


def request_of(**fields: Any) -> TurnRequest:
    return turn_request(decoded(**fields)[0], 77)


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([F, {"type": "custom"}], "tool_choice.allowed_tools.tools[1].custom"),
        ([{"type": "custom", "function": {"name": "f"}}], "tool_choice.allowed_tools.tools[0].custom"),
        ([{"type": "function", "custom": {"name": "f"}}], "tool_choice.allowed_tools.tools[0].function"),
        ([], "tool_choice.allowed_tools.tools"),
    ],
)
def test_an_allowed_tool_has_the_field_of_its_type(tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(tool_choice=allowed("auto", *tools))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, (None, 1, (), None)),
        ({"logprobs": False}, (None, 1, (), None)),
        ({"logprobs": True}, (0, 1, (), None)),
        ({"logprobs": True, "top_logprobs": 4}, (4, 1, (), None)),
        ({"n": 3, "stop": "x"}, (None, 3, ("x",), None)),
        ({"stop": ["x", "y"], "parallel_tool_calls": True}, (None, 1, ("x", "y"), None)),
        ({"parallel_tool_calls": False}, (None, 1, (), 1)),
    ],
)
def test_what_bounds_an_answer_is_the_clients(fields: dict[str, Any], limits: object) -> None:
    request = request_of(**fields)
    assert (request.sampling.logprobs, request.num_choices, request.stop_strings, request.max_calls) == limits
    assert (request.path, request.num_bytes) == ("messages", 77)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {}}, "moderation"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools[0].custom.name"),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "c",
                            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}},
                        },
                    }
                ]
            },
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
def test_a_refused_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoded(**fields)
    assert caught.value.param == param


def test_fields_without_effect_are_accepted_and_unknown_ones_inside_others_named() -> None:
    def unknown(**fields: Any) -> tuple[str, ...]:
        return decoded(**fields)[1]

    harmless = {"modalities": ["text"], "functions": [], "audio": None}
    assert unknown(store=True, service_tier="auto", function_call="none", **harmless) == ()
    assert unknown(prediction={"type": "content", "content": "x"}) == ()
    assert unknown(function_call="auto") == ()
    inner: dict[str, dict[str, Any]] = {
        "nvext": {}, "stream_options": {}, "chat_template_args": {}, "chat_template_kwargs": {},
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "reasoning": {},
        "response_format": {"type": "text"}, "structured_outputs": {},
    }  # fmt: skip
    for name, value in inner.items():
        assert unknown(stream=True, **{name: {**value, "odd": 1}}) == (f"{name}.odd",)
    assert unknown(tools=[{"function": {"name": "f", "odd": 1}}]) == ("tools[].function.odd",)
