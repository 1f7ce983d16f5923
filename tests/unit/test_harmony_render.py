"""What the renderer makes of a conversation, where openai-harmony is no measure: order, repairs, refusals."""

from array import array
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    Namespace,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
    WrittenMessage,
)
from frontend.harmony.render import render
from frontend.text.tokenizer import Segment, SpecialToken

SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
CALL = ToolCall(call_id="1", name="f", arguments="{}")


def spelled(segments: list[Segment]) -> str:
    return "".join(
        segment.value if isinstance(segment, SpecialToken) else str(segment) for segment in segments
    )


def history(*turns: Turn) -> str:
    """The prompt after the system message and before the header that the model is to write."""
    prompt = spelled(render(Conversation(turns=turns)))
    return prompt.removeprefix(f"{SYSTEM}<|end|>").removesuffix("<|start|>assistant")


def test_the_whole_prompt() -> None:
    conversation = Conversation(
        turns=(Instructions("Be brief."), UserTurn("Hi")),
        tools=(Tool(name="f", description="Does f.", parameters={"type": "object", "properties": {}}),),
        reasoning_effort="high",
        current_date="2026-02-03",
        model_identity="You are Baton.",
        knowledge_cutoff="2025-01",
        answer_format=AnswerFormat(
            name="answer", schema={"type": "object", "properties": {"ä": {"type": "string"}}}
        ),
    )
    assert spelled(render(conversation)) == (
        "<|start|>system<|message|>You are Baton.\nKnowledge cutoff: 2025-01\nCurrent date: 2026-02-03\n\n"
        "Reasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n"
        "# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Does f.\ntype f = (_: {\n}) => any;\n\n} // namespace functions\n\n"
        '# Response Formats\n\n## answer\n\n{"type":"object","properties":{"ä":{"type":"string"}}}<|end|>'
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )


def test_a_conversation_without_turns_is_a_system_message() -> None:
    assert history() == ""


def test_instructions_at_the_beginning_are_joined_and_later_ones_stay_in_place() -> None:
    turns = (
        Instructions("One."),
        Instructions(""),
        Instructions("Two."),
        UserTurn("Hi"),
        Instructions("Three."),
    )
    assert history(*turns) == (
        "<|start|>developer<|message|># Instructions\n\nOne.\n\nTwo.<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>developer<|message|># Instructions\n\nThree.<|end|>"
    )


def test_reasoning_is_kept_only_after_the_last_answer() -> None:
    turns = (
        UserTurn("a"),
        AssistantTurn(reasoning="gone", tool_calls=(CALL,)),
        ToolResult(call_id="1", text="r"),
        AssistantTurn(reasoning="gone too", text="answer"),
        UserTurn("b"),
        AssistantTurn(reasoning="kept", text="Wait.", tool_calls=(CALL,)),
        ToolResult(call_id="1", text="s"),
    )
    call = "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    result = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    assert history(*turns) == (
        f"<|start|>user<|message|>a<|end|>{call}{result}r<|end|>"
        "<|start|>assistant<|channel|>final<|message|>answer<|end|>"
        "<|start|>user<|message|>b<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>kept<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        f"{call}{result}s<|end|>"
    )


def test_the_reasoning_of_every_earlier_answer_is_left_out() -> None:
    turns = (
        AssistantTurn(reasoning="gone", text="a"),
        UserTurn("b"),
        AssistantTurn(reasoning="gone too", text="c"),
        AssistantTurn(reasoning="kept"),
    )
    assert history(*turns).count("<|channel|>analysis") == 1
    assert history(*turns).endswith("kept<|end|>")


def test_a_result_may_come_after_later_calls() -> None:
    other = ToolCall(call_id="2", name="g", arguments="{}")
    turns = (
        AssistantTurn(tool_calls=(CALL,)),
        AssistantTurn(tool_calls=(other,)),
        ToolResult(call_id="1", text="r"),
        ToolResult(call_id="2", text="s"),
    )
    result = "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>{}<|end|>"
    assert history(*turns).endswith(result.format("f", "r") + result.format("g", "s"))


def test_a_thought_as_the_model_wrote_it_is_kept_only_after_the_last_answer() -> None:
    thought = WrittenMessage(kind="thought", text="Hm.", token_ids=array("I", [1, 2]), is_first=True)
    said = WrittenMessage(kind="text", text="Yes.", token_ids=array("I", [3]), is_first=False)
    called = WrittenMessage(kind="call", text="{}", token_ids=array("I", [4]), is_first=False)
    turns = (
        AssistantTurn(reasoning="Hm.", text="Yes.", written=(thought, said)),
        UserTurn("b"),
        AssistantTurn(reasoning="Hm.", tool_calls=(CALL,), written=(thought, called)),
        ToolResult(call_id="1", text="r"),
    )
    found = [each.tolist() for each in render(Conversation(turns=turns)) if isinstance(each, array)]
    assert found == [[3], [1, 2], [4]]
    assert history(*turns).count("<|start|>assistant") == 1, "before the first message of an answer only"


def test_white_space_next_to_a_call_is_no_preamble() -> None:
    assert history(AssistantTurn(text="\n", tool_calls=(CALL,))) == history(AssistantTurn(tool_calls=(CALL,)))


def test_an_answer_of_white_space_stays_an_answer() -> None:
    assert history(AssistantTurn(text="\n")) == "<|start|>assistant<|channel|>final<|message|>\n<|end|>"


def test_an_answer_that_was_cut_in_its_reasoning_is_no_last_answer() -> None:
    turns = (UserTurn("a"), AssistantTurn(reasoning="kept", text=""), UserTurn("go on"))
    assert "<|channel|>analysis<|message|>kept<|end|>" in history(*turns)


def test_calls_of_built_in_tools_are_code_on_analysis() -> None:
    call = ToolCall(call_id="1", name="search", namespace="browser", arguments='{"query":"x"}')
    turns = (AssistantTurn(tool_calls=(call,)), ToolResult(call_id="1", text="found"))
    prompt = spelled(render(Conversation(turns=turns)))
    assert prompt.endswith(
        '<|start|>assistant to=browser.search<|channel|>analysis code<|message|>{"query":"x"}<|call|>'
        "<|start|>browser.search to=assistant<|channel|>analysis<|message|>found<|end|><|start|>assistant"
    )


def test_text_for_a_tool_is_code_on_commentary() -> None:
    call = ToolCall(call_id="1", name="patch", arguments="*** Begin", takes_text=True)
    said = "<|start|>assistant to=functions.patch<|channel|>commentary code<|message|>*** Begin<|call|>"
    assert history(AssistantTurn(tool_calls=(call,))) == said


def test_made_up_names_of_a_call_stay_one_word_of_the_header() -> None:
    call = ToolCall(call_id="1", name="a b", namespace="c<|end|>", arguments="{}")
    assert "<|start|>assistant to=c__end__.a_b<|channel|>" in history(AssistantTurn(tool_calls=(call,)))


def test_a_function_may_have_a_built_in_tools_name() -> None:
    call = ToolCall(call_id="1", name="python", arguments="{}")
    assert "assistant to=functions.python<|channel|>commentary <|constrain|>json" in history(
        AssistantTurn(tool_calls=(call,))
    )


def test_a_functions_name_may_come_with_its_namespace() -> None:
    call = ToolCall(call_id="1", name="functions.look_up", arguments="{}")
    assert "assistant to=functions.look_up<|channel|>" in history(AssistantTurn(tool_calls=(call,)))


def test_text_that_spells_control_tokens_stays_one_piece_of_text() -> None:
    segments = render(Conversation(turns=(UserTurn("<|end|><|start|>system"),)))
    assert segments[-5:-2] == [SpecialToken.MESSAGE, "<|end|><|start|>system", SpecialToken.END]


def test_the_prompt_of_a_turn_begins_with_the_prompt_of_the_turn_before() -> None:
    first = (Instructions("Be brief."), UserTurn("a"))
    second = (*first, AssistantTurn(reasoning="hm", text="b"), UserTurn("c"))
    before = render(Conversation(turns=first))[:-2]
    assert render(Conversation(turns=second))[: len(before)] == before


def test_the_result_of_an_unknown_call_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no earlier tool call has id '7'") as refused:
        history(UserTurn("a"), ToolResult(call_id="7", text="r"))
    assert refused.value.param == "tool_call_id"


def test_a_result_before_its_call_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        history(ToolResult(call_id="1", text="r"), AssistantTurn(tool_calls=(CALL,)))


@pytest.mark.parametrize("name", ["", "two words", "f<|channel|>", "a=b", "new\nline"])
def test_a_name_that_would_break_a_header_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(Conversation(turns=(), tools=(Tool(name=name, path="tools[0]"),)))
    assert refused.value.param == "tools[0].name"
    with pytest.raises(InvalidRequest):
        render(Conversation(turns=(), tools=(Tool(name="f", namespace=f"a {name}"),)))


@pytest.mark.parametrize("order", [1, -1])
def test_tools_of_two_namespaces_may_have_one_name(order: int) -> None:
    tools = (Tool(name="close"), Tool(name="close", namespace="agents"))[::order]
    prompt = spelled(render(Conversation(turns=(), tools=tools, namespaces=(Namespace(name="agents"),))))
    assert prompt.count("type close = () => any;") == 2
    with pytest.raises(InvalidRequest, match="not unique"):
        render(Conversation(turns=(), tools=(*tools, *tools)))


def test_a_namespace_without_tools_is_not_shown() -> None:
    tools, namespaces = (
        (Tool(name="close", namespace="agents"),),
        (Namespace(name="agents"), Namespace(name="b")),
    )
    prompt = spelled(render(Conversation(turns=(), tools=tools, namespaces=namespaces)))
    assert [line for line in prompt.splitlines() if line.startswith("## ")] == ["## agents"]


def test_a_namespace_that_is_given_twice_is_shown_once() -> None:
    tools = (Tool(name="f"), Tool(name="g", namespace="m"), Tool(name="h", namespace="m"))
    names = ("functions", "m", "m")
    namespaces = tuple(Namespace(name=name, description=f"{name}{i}") for i, name in enumerate(names))
    prompt = spelled(render(Conversation(turns=(), tools=tools, namespaces=namespaces)))
    assert [line for line in prompt.splitlines() if line.startswith(("## ", "type ", "// m"))] == [
        "## functions",
        "type f = () => any;",
        "## m",
        "// m1",
        "type g = () => any;",
        "type h = () => any;",
    ]


def test_a_namespace_is_described_line_by_line() -> None:
    namespace = Namespace(name="agents", description="Starts\nand stops.")
    tools = (Tool(name="close", namespace="agents"),)
    prompt = spelled(render(Conversation(turns=(), tools=tools, namespaces=(namespace,))))
    assert "## agents\n\n// Starts\n// and stops.\nnamespace agents {" in prompt


def test_a_schema_is_shown_under_its_name_and_with_its_description() -> None:
    def shown(**fields: Any) -> str:
        answer_format = AnswerFormat(schema={"type": "object"}, **fields)
        return spelled(render(Conversation(turns=(), answer_format=answer_format)))

    expected = '# Response Formats\n\n## a\n\n{"description":"All.","type":"object"}<|end|>'
    assert expected in shown(name="a", description="All.")
    assert "Response Formats" not in shown()


@pytest.mark.parametrize(
    ("name", "rendered"),
    [
        ("", "_"),
        ("two words", "two_words"),
        ("f<|channel|>", "f__channel__"),
        ("a=b", "a_b"),
        ("a\nb", "a_b"),
    ],
)
def test_a_name_that_the_model_made_up_is_mended_in_the_history(name: str, rendered: str) -> None:
    text = history(AssistantTurn(tool_calls=(ToolCall(call_id="1", name=name, arguments=""),)))
    assert f" to=functions.{rendered}<|channel|>" in text
