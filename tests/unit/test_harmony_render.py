"""What the renderer makes of a conversation, where openai-harmony is no measure: order, repairs, refusals."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    MAX_DEPTH,
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
    render,
    type_of,
)
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
        answer_format=AnswerFormat(
            name="answer", schema={"type": "object", "properties": {"ä": {"type": "string"}}}
        ),
    )
    assert spelled(render(conversation)) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-02-03\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n"
        "# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Does f.\ntype f = (_: {\n}) => any;\n\n} // namespace functions\n\n"
        '# Response Formats\n\n## answer\n\n{"type":"object","properties":{"ä":{"type":"string"}}}<|end|>'
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )


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


def test_the_reasoning_of_every_earlier_answer_is_left_out() -> None:
    turns = (
        AssistantTurn(reasoning="gone", text="a"),
        UserTurn("b"),
        AssistantTurn(reasoning="gone too", text="c"),
        AssistantTurn(reasoning="kept", text=""),  # cut
        UserTurn("go on"),
    )
    assert history(*turns).count("<|channel|>analysis") == 1
    assert "<|channel|>analysis<|message|>kept<|end|>" in history(*turns)


def test_a_thought_as_the_model_wrote_it_is_kept_only_after_the_last_answer() -> None:
    thought = WrittenMessage(kind="thought", text="Hm.", token_ids=array("I", [1, 2]))
    said = WrittenMessage(kind="text", text="Yes.", token_ids=array("I", [3]))
    called = WrittenMessage(kind="call", text="{}", token_ids=array("I", [4]), call="python")
    turns = (
        AssistantTurn(reasoning="Hm.", text="Yes.", written=(thought, said)),
        UserTurn("b"),
        AssistantTurn(reasoning="Hm.", tool_calls=(CALL,), written=(thought, called)),
        ToolResult(call_id="1", text="r"),
    )
    found = [each.tolist() for each in render(Conversation(turns=turns)) if isinstance(each, array)]
    assert found == [[3], [1, 2], [4]]
    assert history(*turns).count("<|start|>assistant") == 1, "before the first message of an answer only"
    assert "<|start|>python to=assistant<|channel|>analysis<|message|>r<|end|>" in history(*turns)


@pytest.mark.parametrize(
    ("call", "rendered"),
    [
        ({"name": "search", "namespace": "browser"}, "browser.search<|channel|>analysis code<|message|>x"),
        ({"name": "patch", "takes_text": True}, "functions.patch<|channel|>commentary code<|message|>x"),
        ({"name": "python"}, "functions.python<|channel|>commentary <|constrain|>json<|message|>x"),
        ({"name": "functions.f"}, "functions.f<|channel|>"),
        ({"name": "a b", "namespace": "c<|end|>"}, "c__end__.a_b<|channel|>"),
        ({"name": ""}, "functions._<|channel|>"),
        ({"name": "f<|channel|>"}, "functions.f__channel__<|channel|>"),
        ({"name": "a=b"}, "functions.a_b<|channel|>"),
    ],
)
def test_a_call_has_one_word_as_its_recipient(call: dict[str, Any], rendered: str) -> None:
    turn = AssistantTurn(tool_calls=(ToolCall(call_id="1", arguments="x", **call),))
    assert history(turn).startswith(f"<|start|>assistant to={rendered}")


def test_the_result_of_a_built_in_tool_is_on_analysis() -> None:
    call = ToolCall(call_id="1", name="search", namespace="browser", arguments="x")
    turns = (AssistantTurn(tool_calls=(call,)), ToolResult(call_id="1", text="found"))
    result = "<|start|>browser.search to=assistant<|channel|>analysis<|message|>found<|end|>"
    assert history(*turns).endswith(result)


@pytest.mark.parametrize(
    "turns",
    [
        (UserTurn("a"), ToolResult(call_id="1", text="r")),
        (ToolResult(call_id="1", text="r"), AssistantTurn(tool_calls=(CALL,))),
    ],
)
def test_a_result_without_an_earlier_call_is_refused(turns: tuple[Turn, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        history(*turns)
    assert refused.value.param == "tool_call_id"


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
    assert ": 'functions'." in prompt
    assert ": 'functions'." not in spelled(render(Conversation(turns=(), tools=(tools[order > 0],))))
    with pytest.raises(InvalidRequest, match="not unique"):
        render(Conversation(turns=(), tools=(*tools, *tools)))


def test_a_namespace_that_is_given_twice_is_shown_once() -> None:
    tools = (Tool(name="f"), Tool(name="g", namespace="m"), Tool(name="h", namespace="m"))
    names = ("functions", "m", "m", "unused")
    namespaces = tuple(Namespace(name=name, description=f"{name}{i}\nmore") for i, name in enumerate(names))
    prompt = spelled(render(Conversation(turns=(), tools=tools, namespaces=namespaces)))
    assert [line for line in prompt.splitlines() if line.startswith(("## ", "type ", "// m"))] == [
        "## functions",
        "type f = () => any;",
        "## m",
        "// m1",
        "// more",
        "type g = () => any;",
        "type h = () => any;",
    ]


def test_a_schema_is_shown_under_its_name_and_with_its_description() -> None:
    def shown(**fields: Any) -> str:
        answer_format = AnswerFormat(schema={"type": "object"}, **fields)
        return spelled(render(Conversation(turns=(), answer_format=answer_format)))

    expected = '# Response Formats\n\n## a\n\n// All.\n// Of it.\n{"type":"object"}<|end|>'
    assert expected in shown(name="a", description="All.\nOf it.")
    assert "Response Formats" not in shown()


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


def test_a_value_that_nests_too_deeply_is_refused() -> None:
    value: object = {}
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
