"""A chat body as a conversation: pure functions, no HTTP."""

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody, conversation, not_enforced, turn_request
from frontend.harmony.conversation import (
    MODEL_IDENTITY,
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    TextGrammar,
    Tool,
    ToolCall,
    ToolResult,
    UserTurn,
)
from frontend.http.body import decode

HEALTH_TOOL = {
    "type": "function",
    "function": {"name": "get_system_health", "parameters": {"type": "object"}},
}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}
CALL = {"id": "call-1", "type": "function", "function": {"name": "get_system_health", "arguments": "{}"}}


def body_of(*messages: dict[str, Any], **fields: Any) -> ChatBody:
    listed = list(messages) or [{"role": "user", "content": "Hi"}]
    return decode(json.dumps({"model": "m", "messages": listed, **fields}).encode(), ChatBody)[0]


def talk_of(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return conversation(body_of(*messages, **fields))


def test_each_role_becomes_its_turn_in_order() -> None:
    talk = talk_of(
        {"role": "system", "content": "Be brief."},
        {
            "role": "developer",
            "content": [{"type": "text", "text": "No "}, {"type": "text", "text": "jokes."}],
        },
        {"role": "user", "content": "All up?"},
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": "All up.", "reasoning": "Fine."},
        {"role": "user", "content": "Thanks"},
    )
    called = ToolCall(call_id="call-1", name="get_system_health", arguments="{}")
    assert talk.turns == (
        Instructions("Be brief."),
        Instructions("No jokes."),
        UserTurn("All up?"),
        AssistantTurn(reasoning="Look.", tool_calls=(called,)),
        ToolResult(call_id="call-1", text="ok", path="messages[4].tool_call_id"),
        AssistantTurn(reasoning="Fine.", text="All up."),
        UserTurn("Thanks"),
    )  # fmt: skip


def test_what_the_model_refused_is_its_answer() -> None:
    talk = talk_of(
        {"role": "assistant", "content": None, "refusal": "No."}, {"role": "user", "content": "Please"}
    )
    assert talk.turns == (AssistantTurn(text="No."), UserTurn("Please"))


def test_tools_are_offered_unless_tool_choice_is_none() -> None:
    offered = (Tool(name="get_system_health", parameters={"type": "object"}, path="tools[0].function"),)
    assert talk_of(tools=[HEALTH_TOOL]).tools == offered
    assert talk_of(tools=[HEALTH_TOOL], tool_choice="auto").tools == offered
    assert talk_of(tools=[HEALTH_TOOL], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "high"}, "high"),
        ({"chat_template_args": {"reasoning_effort": "low"}}, "low"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning_effort": "high", "chat_template_args": {"reasoning_effort": "low"}}, "high"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"reasoning_effort": "max"}, "high"),
    ],
)
def test_reasoning_effort_is_heard_wherever_it_is_said(fields: dict[str, Any], effort: str) -> None:
    assert talk_of(**fields).reasoning_effort == effort


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_args": {"model_identity": "Ada"}, "chat_template_kwargs": {"model_identity": "Bob"}},
        {"chat_template_args": {}, "chat_template_kwargs": {"model_identity": "Ada"}},
    ],
)
def test_the_first_identity_given_replaces_the_default(fields: dict[str, Any]) -> None:
    assert talk_of(**fields).model_identity == "Ada"
    assert talk_of(chat_template_args={}).model_identity == MODEL_IDENTITY
    assert not talk_of(chat_template_args={"model_identity": ""}).model_identity


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, "messages[0].content[1].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "messages[0].content[0].refusal"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)  # fmt: skip
def test_content_that_is_not_text_is_refused_with_its_path(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        talk_of(message)
    assert caught.value.param == param


def test_a_refusal_repeats_only_the_beginning_of_an_odd_type() -> None:
    with pytest.raises(InvalidRequest) as caught:
        talk_of({"role": "user", "content": [{"type": "x" * 10_000}]})
    assert "xxx" in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}, "stream": False}, "stream_options"),
    ],
)
def test_what_cannot_be_honoured_yet_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        turn_request(body_of(**fields), 0)
    assert caught.value.param == param


def test_wishes_that_are_not_enforced_are_named() -> None:
    named = {"role": "user", "content": "x", "name": "Ada"}
    assert list(not_enforced(body_of({"role": "user", "content": "x"}, named))) == ["messages[].name"]
    assert list(not_enforced(body_of(tools=[HEALTH_TOOL]))) == []
    assert list(not_enforced(body_of(reasoning_effort="low"))) == []
    assert list(not_enforced(body_of(reasoning_effort="xhigh"))) == ["reasoning_effort"]


def test_tools_keep_their_fields() -> None:
    function = {"name": "f", "description": "Does f.", "parameters": {}, "strict": True}
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    made = talk_of(
        tools=[
            {"type": "function", "function": function},
            {"type": "custom", "custom": {"name": "c", "description": "Does c.", "format": {"type": "text"}}},
            {"type": "custom", "custom": {"name": "d", "format": grammar}},
        ]
    ).tools
    path = "tools[2].custom.format.grammar.definition"
    assert made == (
        Tool(name="f", description="Does f.", parameters={}, strict=True, path="tools[0].function"),
        Tool(name="c", description="Does c.", takes_text=True, path="tools[1].custom"),
        Tool(
            name="d",
            takes_text=True,
            grammar=TextGrammar(syntax="regex", text="a+", path=path),
            path="tools[2].custom",
        ),
    )


def test_a_call_of_a_custom_tool_is_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    [turn] = talk_of({"role": "assistant", "tool_calls": [CALL, call]}).turns
    assert isinstance(turn, AssistantTurn)
    assert [each.takes_text for each in turn.tool_calls] == [False, True]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat(schema={"type": "object"}, path="response_format")),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
            AnswerFormat(schema={}, name="a", strict=True, path="response_format.json_schema.schema"),
        ),
    ],
)
def test_a_response_format_is_the_answers(given: dict[str, Any], answer: AnswerFormat | None) -> None:
    assert talk_of(response_format=given).answer_format == answer


def test_the_newer_name_of_the_limit_counts_more() -> None:
    assert turn_request(body_of(max_tokens=5), 0).sampling.max_tokens == 5
    assert turn_request(body_of(max_tokens=5, max_completion_tokens=7), 0).sampling.max_tokens == 7


def test_the_user_takes_turns_with_others() -> None:
    assert turn_request(body_of(user="ada"), 0).user == "ada"
    assert turn_request(body_of(user="ada", safety_identifier="bob"), 0).user == "bob"


def test_a_picture_in_a_tools_result_is_replaced_by_a_note_and_named() -> None:
    shown: list[dict[str, Any]] = [{"type": "text", "text": "Done. "}, IMAGE]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": shown},
    ]
    result = talk_of(*messages).turns[-1]
    assert isinstance(result, ToolResult)
    assert result.text == "Done. [image_url left out: this model reads text only]"
    assert [*not_enforced(body_of(*messages))] == ["messages[].content[].image_url"]
    with pytest.raises(InvalidRequest):
        talk_of({"role": "user", "content": shown})
