"""A Messages body as a request to the model: what each field becomes, and what is refused. No HTTP."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Instructions,
    Tool,
    ToolCall,
    ToolResult,
    UserTurn,
)
from frontend.http.body import decode
from frontend.messages.request import Counted, MessagesBody, turn_request
from frontend.turn.request import TurnRequest, demanded
from frontend.turn.thoughts import Seal, one_answer

Json = dict[str, Any]

SEAL = Seal(b"k" * 32)
HI = {"role": "user", "content": "Hi"}
TOOL: Json = {"name": "f", "input_schema": {"type": "object"}}
SEARCH: Json = {"name": "web_search", "type": "web_search_20250305"}
TEXT_A, TEXT_B = ({"type": "text", "text": text} for text in "AB")
USE: Json = {"type": "tool_use", "id": "c", "name": "f"}
OURS: Json = {"type": "thinking", "thinking": "Hm.", "signature": SEAL.sign("Hm.")}


def read(
    *messages: Json, body_type: type[Counted] = MessagesBody, **fields: Any
) -> tuple[TurnRequest, list[str]]:
    limit = {"max_tokens": 9} if body_type is MessagesBody else {}
    raw = json.dumps({"model": "m", "messages": list(messages) or [HI], **limit, **fields}).encode()
    body, _ = decode(raw, body_type)
    return turn_request(body, len(raw), SEAL)


def talk(*messages: Json, **fields: Any) -> Conversation:
    prompt = read(*messages, **fields)[0].prompt
    assert isinstance(prompt, Conversation)
    return prompt


def user(*blocks: Json) -> Json:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Json) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def written(*blocks: Json) -> AssistantTurn:
    turns = talk(HI, assistant(*blocks), HI).turns
    (turn,) = turns[1:-1]
    assert isinstance(turn, AssistantTurn)
    return replace(turn, parts=())


def test_limits_and_sampling_are_the_clients() -> None:
    request, _ = read(max_tokens=7, stop_sequences=["a", "b"], temperature=0.5, top_p=0.25, top_k=3)
    assert (request.max_tokens, request.stop, request.path) == (7, ["a", "b"], "messages")
    sampling = request.fields
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert request.num_bytes > 100, "a long body is rendered in a thread"
    counted, _ = read(body_type=Counted)
    assert (counted.stop, counted.fields.temperature) == (None, None)


@pytest.mark.parametrize(
    ("choice", "num_called", "max_calls"),
    [
        (None, 0, None),
        ({"type": "auto"}, 0, None),
        ({"type": "auto", "disable_parallel_tool_use": False}, 0, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, 0, 1),
        ({"type": "none"}, 0, None),
        ({"type": "any"}, 2, None),
        ({"type": "tool", "name": "f"}, 1, None),
    ],
)
def test_tool_choice_limits_the_calls(choice: Json | None, num_called: int, max_calls: int | None) -> None:
    request, _ = read(tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice)
    form = demanded(request)
    assert (0 if form is None else len(form.last), request.max_calls) == (num_called, max_calls)
    prompt = request.prompt
    assert isinstance(prompt, Conversation)
    assert len(prompt.tools) == (0 if choice == {"type": "none"} else 2)


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"thinking": {"type": "disabled", "budget_tokens": 32000}}, "low"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 32000}}, "medium"),
        ({"thinking": {"type": "enabled"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2049}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 12_000}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 32000}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
    ],
)
def test_a_thinking_budget_becomes_the_nearest_effort(fields: Json, effort: str) -> None:
    assert talk(**fields).reasoning_effort == effort


def test_a_tool_keeps_its_fields_and_its_place() -> None:
    custom = {**TOOL, "type": "custom", "description": "Does f.", "strict": True}
    request, ignored = read(tools=[SEARCH, custom])
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.tools == (
        Tool(name="f", description="Does f.", parameters={"type": "object"}, strict=True, path="tools[1]"),
    )
    assert ignored == ["tools[].web_search_20250305"]


def test_each_role_becomes_its_turn_in_order() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "é"}}
    bare = {"type": "tool_use", "id": "d", "name": "f"}
    results = [
        {"type": "text", "text": "Here"},
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "18"}]},
        {"type": "tool_result", "tool_use_id": "d", "is_error": True},
        {"type": "text", "text": "you are."},
    ]
    turns = talk(
        HI,
        {"role": "assistant", "content": "One moment."},
        {"role": "assistant", "content": [call, bare]},
        {"role": "user", "content": results},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
    ).turns
    calls = (
        ToolCall(call_id="c", name="f", arguments='{"a":"é"}'),
        ToolCall(call_id="d", name="f", arguments="{}"),
    )
    assert turns == (
        Instructions("A\n\nB"),
        UserTurn("Hi"),
        one_answer([AssistantTurn(text="One moment."), *(AssistantTurn(tool_calls=(c,)) for c in calls)]),
        ToolResult(call_id="c", text="18", path="messages[3].content[1].tool_use_id"),
        ToolResult(call_id="d", text="Error: ", path="messages[3].content[2].tool_use_id"),
        UserTurn("Here\n\nyou are."),
        Instructions("Be brief."),
        ToolResult(call_id="c", text="", path="messages[6].content[0].tool_use_id"),
    )


def test_only_this_services_reasoning_goes_back_into_the_prompt() -> None:
    assert written(OURS, TEXT_A) == AssistantTurn(reasoning="Hm.", text="A")
    for signature in (None, "", Seal(b"o" * 32).sign("Hm.")):
        assert written(OURS | {"signature": signature}, TEXT_A) == AssistantTurn(text="A")


def document(source: Json, **fields: Any) -> Json:
    return {"type": "document", "source": source, **fields}


FOUND: Json = {
    "type": "search_result",
    "source": "https://example.org/a",
    "title": "A",
    "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
    "citations": {"enabled": True},
}


@pytest.mark.parametrize(
    ("block", "text", "left_out"),
    [
        (document({"type": "text", "data": "Plain."}), "Plain.", ""),
        (document({"type": "base64", "data": "eA=="}), "[document left out", "document"),
        (document({"type": "content", "content": [TEXT_A]}, title="T", context="C"), "T\n\nC\n\nA", ""),
        (document({"type": "content", "content": [{"type": "image"}]}, title=None), "[image left", "image"),
        ({"type": "image"}, "[image left out", "image"),
        ({"type": "k" * 99}, f"[{'k' * 40} left out", "k" * 59),
        ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
         "[server_tool_use left out: this model reads text only]", "server_tool_use"),
        ({"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_result"}},
         "[web_fetch_tool_result left out", "web_fetch_tool_result"),
        ({"type": "from_a_later_year", "source": "s"}, "[from_a_later_year left", "from_a_later_year"),
        (FOUND, "One.\n\nTwo.", ""),
        (FOUND | {"content": "Three."}, "Three.", ""),
        (FOUND | {"content": [{"type": "image"}, TEXT_A]}, "[image left out", "image"),
        ({"type": "thinking", "thinking": "Hm."}, None, "thinking"),
        ({"type": "redacted_thinking", "data": "x"}, None, "thinking"),
    ],
)  # fmt: skip
def test_content_that_is_not_text_leaves_a_note(block: Json, text: str | None, left_out: str) -> None:
    request, ignored = read({"role": "user", "content": [block]})
    assert isinstance(request.prompt, Conversation)
    assert ignored == ([f"messages[].content[].{left_out}"] if left_out else [])
    turns = request.prompt.turns
    assert [turn.text.startswith(text or "") for turn in turns if isinstance(turn, UserTurn)] == (
        [] if text is None else [True]
    )


CALLED = (ToolCall(call_id="c", name="f", arguments="{}"),)


@pytest.mark.parametrize(
    ("blocks", "turn"),
    [
        ([TEXT_A, TEXT_B], AssistantTurn(text="A\n\nB")),
        ([OURS, TEXT_A, {"type": "redacted_thinking"}, TEXT_B],
         AssistantTurn(reasoning="Hm.", text="A\n\nB")),
        ([TEXT_A, USE, TEXT_B], AssistantTurn(text="A\n\nB", tool_calls=CALLED)),
        ([OURS, TEXT_A, USE], AssistantTurn(reasoning="Hm.", text="A", tool_calls=CALLED)),
    ],
)  # fmt: skip
def test_the_blocks_of_one_message_are_one_answer(blocks: list[Json], turn: AssistantTurn) -> None:
    assert written(*blocks) == turn


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "document", "source": 5}, "source"),
        ({"type": "document", "source": {"content": [5]}}, "source.content[0]"),
        ({"type": "tool_result", "tool_use_id": "c", "content": 5}, "content"),
        ({"type": "tool_result", "tool_use_id": "c", "content": {}}, "content"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text"}]}, "content[0].text"),
        ({"type": "web_fetch_tool_result", "content": 5}, "content"),
        ({**FOUND, "content": {}}, "content"),
        ({**FOUND, "content": None}, "content"),
        ({**FOUND, "content": [{"type": "text"}]}, "content[0].text"),
    ],
)
def test_a_misshapen_block_is_refused_by_path(block: Json, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"role": "user", "content": [{"type": "text", "text": "Hi"}, block]})
    assert caught.value.param == f"messages[0].content[1].{field}"
    assert f"`{caught.value.param}`" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI, {"role": "assistant", "content": "{"}]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 2}, "temperature"),
        ({"thread": {"type": "resume"}}, "thread.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"messages": [user({"type": "tool_result"})]}, "messages[0].content[0].tool_use_id"),
        ({"tools": [{**TOOL, "type": "custom", "input_schema": None}]}, "tools[0].input_schema"),
        ({"container": "c"}, "container"),
        ({"tools": [SEARCH]}, "tools"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [HI, assistant({"type": "tool_use", "name": "f"}), HI]}, "messages[1].content[0].id"),
        ({"messages": [HI, assistant({"type": "tool_use", "id": "c"}), HI]}, "messages[1].content[0].name"),
        ({"messages": [HI, assistant(OURS | {"thinking": "No."}), HI]}, "messages[1].content[0].signature"),
    ],
)
def test_a_refused_field_is_named(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        demanded(read(**fields)[0])
    assert caught.value.param == param


def test_hints_are_accepted_and_unknown_fields_named() -> None:
    hints: Json = {name: {"edits": []} for name in MessagesBody.hints}
    assert {"metadata", "cache_control", "context_management"} <= hints.keys()
    given = {"model": "m", "max_tokens": 9, "messages": [HI], "output_config": {"effort": "xhigh"}}
    _, unknown = decode(json.dumps(given | hints).encode(), MessagesBody)
    assert unknown == ()
    for name in ("tool_choice", "thinking", "output_config"):
        inner = {"type": "auto"} if name == "tool_choice" else {}
        inner |= {"type": "adaptive"} if name == "thinking" else {}
        _, unknown = decode(json.dumps(given | {name: inner | {"odd": 1}}).encode(), MessagesBody)
        assert unknown == (f"{name}.odd",)


BILLING = "x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=cli; cch=36ee5;"


@pytest.mark.parametrize(
    ("system", "turns"),
    [
        ([BILLING, "You are an agent."], (Instructions("You are an agent."), UserTurn("Hi"))),
        (f"{BILLING}\n\nYou are an agent.", (Instructions("You are an agent."), UserTurn("Hi"))),
        ([BILLING], (UserTurn("Hi"),)),
        (f"See {BILLING}", (Instructions(f"See {BILLING}"), UserTurn("Hi"))),
        (["A", f"{BILLING}\nB"], (Instructions(f"A\n\n{BILLING}\nB"), UserTurn("Hi"))),
    ],
)
def test_a_line_for_anthropics_billing_is_no_instruction(
    system: str | list[str], turns: tuple[object, ...]
) -> None:
    parts = [{"type": "text", "text": text} for text in system] if isinstance(system, list) else system
    assert talk(HI, system=parts).turns == turns
