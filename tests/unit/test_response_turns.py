"""Items of responses as turns: what the model said between two others is one turn for each thought."""

from typing import Literal

import msgspec
import pytest

from frontend.harmony.conversation import AssistantTurn, ToolCall, ToolResult, Turn
from frontend.responses.items import (
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
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


def test_thought_preamble_text_and_calls_are_one_turn() -> None:
    whole = made_of(thought("Hm."), answer("I look.", "commentary"), answer("Yes."), call("a"), call("b"))
    assert whole == [
        AssistantTurn(reasoning="Hm.", preamble="I look.", text="Yes.", tool_calls=calls("a", "b"))
    ]


def test_a_thought_that_was_given_as_a_summary_is_a_thought() -> None:
    item = ReasoningItem(id="r", status="completed", summary=[SummaryText(text="Hm.")])
    assert made_of(item, call("a")) == [AssistantTurn(reasoning="Hm.", tool_calls=calls("a"))]


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
