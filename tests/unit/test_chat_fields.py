"""A chat body as a request: what each field becomes, what is refused, what has no effect. No HTTP."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.chat import ChatBody, turn_request
from frontend.harmony.conversation import (
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    TextGrammar,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.http.body import decode
from frontend.turn.request import TurnRequest, demanded

Json = dict[str, Any]

HI: Json = {"role": "user", "content": "Hi"}
F: Json = {"type": "function", "function": {"name": "f"}}
C: Json = {"type": "custom", "custom": {"name": "c"}}
IMAGE: Json = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
CALL: Json = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PATCH_CALL: Json = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}


def body_of(*messages: Json, **fields: Any) -> tuple[ChatBody, tuple[str, ...]]:
    body = {"model": "m", "messages": list(messages) or [HI], **fields}
    return decode(json.dumps(body).encode(), ChatBody)


def request_of(*messages: Json, **fields: Any) -> TurnRequest:
    return turn_request(body_of(*messages, **fields)[0], 77)[0]


def talk_of(*messages: Json, **fields: Any) -> Conversation:
    prompt = request_of(*messages, **fields).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def allowed(mode: str, *tools: Json) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"role": "system", "content": "Be brief."}, Instructions("Be brief.")),
        (
            {"role": "developer", "content": [{"type": "text", "text": t} for t in ("No ", "jokes.")]},
            Instructions("No jokes."),
        ),
        ({"role": "user", "content": "All up?"}, UserTurn("All up?")),
        ({"role": "assistant", "content": "Yes.", "reasoning": "Hm."},
         AssistantTurn(reasoning="Hm.", text="Yes.")),
        ({"role": "assistant", "content": None, "refusal": "No."}, AssistantTurn(text="No.")),
        (
            {"role": "assistant", "reasoning_content": "Look.", "tool_calls": [CALL, PATCH_CALL]},
            AssistantTurn(
                reasoning="Look.",
                tool_calls=(
                    ToolCall(call_id="call-1", name="f", arguments="{}"),
                    ToolCall(call_id="c", name="patch", arguments="*** Begin", takes_text=True),
                ),
            ),
        ),
        (
            {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "ok"}, IMAGE]},
            ToolResult(
                call_id="call-1",
                text="ok[image_url left out: this model reads text only]",
                path="messages[0].tool_call_id",
            ),
        ),
    ],
)  # fmt: skip
def test_each_message_becomes_a_turn(message: Json, turn: Turn) -> None:
    assert talk_of(message).turns == (turn,)


def test_text_in_a_message_before_its_calls_is_a_preamble_and_keeps_its_reasoning() -> None:
    said = {"role": "assistant", "content": "Let me look.", "reasoning": "Hm."}
    (turn,) = talk_of(said, {"role": "assistant", "tool_calls": [CALL]}).turns
    assert isinstance(turn, AssistantTurn)
    assert (turn.reasoning, turn.text, turn.is_final) == ("Hm.", "Let me look.", False)


def test_tools_keep_their_fields_and_are_not_offered_with_tool_choice_none() -> None:
    function = {"name": "f", "description": "Does f.", "parameters": {}, "strict": True}
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    tools: list[Json] = [
        {"type": "function", "function": function},
        {"type": "custom", "custom": {"name": "c", "description": "Does c.", "format": {"type": "text"}}},
        {"type": "custom", "custom": {"name": "d", "format": grammar}},
    ]
    path = "tools[2].custom.format.grammar.definition"
    assert talk_of(tools=tools).tools == (
        Tool(name="f", description="Does f.", parameters={}, strict=True, path="tools[0].function"),
        Tool(name="c", description="Does c.", takes_text=True, path="tools[1].custom"),
        Tool(
            name="d",
            takes_text=True,
            grammar=TextGrammar(syntax="regex", text="a+", path=path),
            path="tools[2].custom",
        ),
    )
    assert talk_of(tools=tools, tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"chat_template_args": {"reasoning_effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ({"reasoning_effort": "high", "chat_template_args": {"reasoning_effort": "low"}}, "high"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "max"}, "high"),
    ],
)
def test_the_effort_is_the_nearest_that_the_model_has(fields: Json, effort: str) -> None:
    assert talk_of(**fields).reasoning_effort == effort


def test_a_response_format_is_the_answers() -> None:
    given = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}}
    answer = AnswerFormat(schema={}, name="a", strict=True, path="response_format.json_schema.schema")
    assert talk_of(response_format=given).answer_format == answer


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"logprobs": True, "max_tokens": 5}, (0, None, None, None, 5)),
        ({"logprobs": True, "top_logprobs": 4}, (4, None, None, None, None)),
        ({"n": 3, "stop": "x", "logprobs": False}, (None, 3, "x", None, None)),
        ({"stop": ["x", "y"], "parallel_tool_calls": True}, (None, None, ["x", "y"], None, None)),
        ({"parallel_tool_calls": False}, (None, None, None, 1, None)),
        ({"max_tokens": 5, "max_completion_tokens": 7}, (None, None, None, None, 7)),
    ],
)
def test_the_limits_of_an_answer_are_the_clients(fields: Json, limits: object) -> None:
    request = request_of(**fields)
    made = (request.logprobs, request.num_choices, request.stop, request.max_calls, request.max_tokens)
    assert made == limits
    assert (request.path, request.num_bytes) == ("messages", 77)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}]},
         "messages[0].content[0].refusal"),
        ({"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
         "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
         "messages[0].tool_calls[0].custom"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"custom": {"name": "x"}}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
         "tools[0].custom.format.grammar"),
        ({"tool_choice": allowed("auto", F, {"type": "custom"})},
         "tool_choice.allowed_tools.tools[1].custom"),
        ({"tool_choice": allowed("auto", {"custom": {"name": "f"}})},
         "tool_choice.allowed_tools.tools[0].function"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [F], "tool_choice": C}, "tool_choice"),
    ],
)  # fmt: skip
def test_a_refused_field_is_named(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        demanded(request_of(**fields))
    assert caught.value.param == param


def test_a_refusal_repeats_only_the_beginning_of_an_odd_type() -> None:
    with pytest.raises(InvalidRequest) as caught:
        talk_of({"role": "user", "content": [{"type": "x" * 10_000}]})
    assert "xxx" in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("messages", "fields", "paths"),
    [
        ([HI | {"name": "Ada"}], {}, ["messages[].name"]),
        ([HI], {"tools": [F], "reasoning_effort": "low"}, []),
        ([HI], {"reasoning_effort": "xhigh"}, ["reasoning_effort"]),
        ([{"role": "tool", "tool_call_id": "c", "content": [IMAGE]}], {}, ["messages[].content[].image_url"]),
    ],
)
def test_what_is_not_enforced_is_named(messages: list[Json], fields: Json, paths: list[str]) -> None:
    assert turn_request(body_of(*messages, **fields)[0], 77)[1] == paths


def test_fields_without_effect_are_accepted_and_unknown_ones_inside_others_named() -> None:
    def unknown(**fields: Any) -> tuple[str, ...]:
        return body_of(**fields)[1]

    harmless = {"modalities": ["text"], "functions": [], "audio": None}
    assert unknown(store=True, service_tier="auto", function_call="none", **harmless) == ()
    assert unknown(prediction={"type": "content", "content": "x"}, function_call="auto") == ()
    inner: dict[str, Json] = {
        "nvext": {}, "stream_options": {}, "chat_template_args": {}, "chat_template_kwargs": {},
        "tool_choice": F, "response_format": {"type": "text"}, "structured_outputs": {},
    }  # fmt: skip
    for name, value in inner.items():
        assert unknown(stream=True, **{name: {**value, "odd": 1}}) == (f"{name}.odd",)
    assert unknown(tools=[{"function": {"name": "f", "odd": 1}}]) == ("tools[].function.odd",)
    choice = allowed("auto", {"function": {"name": "f", "odd": True}})
    assert unknown(tools=[F], tool_choice=choice) == ("tool_choice.allowed_tools.tools[].function.odd",)
