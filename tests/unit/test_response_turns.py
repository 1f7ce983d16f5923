"""Items of responses as turns: what the model said between two others is one turn for each thought."""

from typing import Literal

import msgspec
import pytest

from frontend.harmony.conversation import AssistantTurn, Instructions, ToolCall, ToolResult, Turn, UserTurn
from frontend.responses.items import (
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputText,
    Item,
    LocalShellOutputItem,
    MessageItem,
    OutputText,
    PatchOutputItem,
    ReasoningItem,
    ReasoningText,
    ShellOutputItem,
    SummaryText,
    turns,
)


def said(role: Literal["user", "system", "developer"], text: str) -> MessageItem:
    parts: list[InputText | OutputText] = [InputText(text=text[:1]), InputText(text=text[1:])]
    return MessageItem(id="m", role=role, status="completed", content=parts)


def answer(text: str, phase: Literal["commentary", "final_answer"] | None = None) -> MessageItem:
    item = MessageItem(id="m", role="assistant", status="completed", content=[OutputText(text=text)])
    return item if phase is None else msgspec.structs.replace(item, phase=phase)


def thought(text: str) -> ReasoningItem:
    return ReasoningItem(id="r", status="completed", content=[ReasoningText(text=text)])


def call(call_id: str) -> FunctionCallItem:
    return FunctionCallItem(id="f", call_id=call_id, name="f", arguments="{}", status="completed")


def output(call_id: str, text: str = "out") -> FunctionOutputItem:
    return FunctionOutputItem(id="o", call_id=call_id, output=text, status="completed")


def made_of(*items: Item) -> list[Turn]:
    return list(turns(items, lambda i: f"input[{i}]"))


def calls(*call_ids: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(call_id=call_id, name="f", arguments="{}") for call_id in call_ids)


def test_others_turns_are_told_apart_by_their_role() -> None:
    assert made_of(said("user", "One"), said("system", "Two"), said("developer", "Three")) == [
        UserTurn("One"),
        Instructions("Two"),
        Instructions("Three"),
    ]


def test_thought_preamble_text_and_calls_are_one_turn() -> None:
    whole = made_of(thought("Hm."), answer("I look.", "commentary"), answer("Yes."), call("a"), call("b"))
    assert whole == [
        AssistantTurn(reasoning="Hm.", preamble="I look.", text="Yes.", tool_calls=calls("a", "b"))
    ]


def test_several_preambles_are_one() -> None:
    items = (answer("One.", "commentary"), thought("Hm."), answer("Two.", "commentary"))
    assert made_of(*items) == [AssistantTurn(reasoning="Hm.", preamble="One.\n\nTwo.")]


def test_a_thought_that_was_given_as_a_summary_is_a_thought() -> None:
    item = ReasoningItem(id="r", status="completed", summary=[SummaryText(text="Hm.")])
    assert made_of(item, call("a")) == [AssistantTurn(reasoning="Hm.", tool_calls=calls("a"))]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([answer("One.")], [answer("Two.")]),
        ([answer("One.")], [thought("Hm."), answer("Two.")]),
        ([answer("One.")], [answer("Two.", "commentary")]),
        ([call("a")], [answer("Two.")]),
        ([call("a")], [answer("Two.", "commentary")]),
        ([thought("Hm.")], [thought("Ah."), answer("Two.")]),
    ],
)
def test_what_cannot_follow_in_a_turn_begins_the_next(first: list[Item], second: list[Item]) -> None:
    assert made_of(*first, *second) == [*made_of(*first), *made_of(*second)]


def test_the_result_of_a_call_follows_it_wherever_the_call_was() -> None:
    assert made_of(call("a"), said("user", "Wait"), output("a")) == [
        AssistantTurn(tool_calls=calls("a")),
        UserTurn("Wait"),
        ToolResult(call_id="a", text="out", path="input[2].call_id"),
    ]


@pytest.mark.parametrize(
    "result",
    [
        output("a"),
        CustomOutputItem(id="o", call_id="a", output="out", status="completed"),
        LocalShellOutputItem(call_id="a", output="out"),
        ShellOutputItem(call_id="a", output="out"),
        PatchOutputItem(call_id="a", output="out"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_the_result_of_any_call_knows_its_place_in_the_body(result: Item) -> None:
    assert made_of(call("a"), result)[1:] == [ToolResult(call_id="a", text="out", path="input[1].call_id")]


def test_the_output_of_a_local_shell_may_name_its_call_in_id() -> None:
    (result,) = made_of(call("a"), LocalShellOutputItem(id="a", output="out"))[1:]

    assert result == ToolResult(call_id="a", text="out", path="input[1].id")


def test_an_item_that_says_nothing_is_no_turn() -> None:
    silent = answer(""), answer("", "commentary")
    assert made_of(*silent, said("user", "Hi"), answer("Yes."), answer("")) == [
        UserTurn("Hi"),
        AssistantTurn(text="Yes."),
    ]
