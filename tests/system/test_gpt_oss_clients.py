"""openai/gpt-oss's own clients: the requests of its compatibility test and of its evals' samplers."""

import json
from typing import Any

import jsonschema
import openai
import pytest
import yaml

from tests.stack import MODEL, ROOT, Stack

Json = dict[str, Any]
TOOLS: dict[str, Json] = yaml.safe_load((ROOT / "tests/data/compatibility_tools.yaml").read_text())
SLOW = pytest.mark.slow
NAMES = [
    name if name in ("get_system_health", "get_weather") else pytest.param(name, marks=SLOW) for name in TOOLS
]
MAX_TURNS = 10


def chat_loop(stack: Stack, name: str, **extra: Any) -> tuple[list[Json], list[str]]:
    """The messages of a run of the agent loop over chat completions, and the arguments of its calls."""
    tool = TOOLS[name]
    function = {"name": name, "description": tool["about"], "parameters": tool["parameters"], "strict": False}
    body = {"tools": [{"type": "function", "function": function}], "response_format": {"type": "text"}}
    history: list[Json] = [{"role": "user", "content": tool["asked"]}]
    messages: list[Json] = []
    arguments: list[str] = []
    for _ in range(MAX_TURNS):
        answer = stack.answer(
            "/v1/chat/completions", messages=history, temperature=0, max_tokens=400, **body, **extra
        )
        (choice,) = answer["choices"]
        message = choice["message"]
        messages.append(message)
        if not message.get("tool_calls") or choice["finish_reason"] == "length":
            break
        # The agent library sends the message back unchanged, with `reasoning`.
        history.append(message)
        for call in message["tool_calls"]:
            arguments.append(call["function"]["arguments"])
            result = json.dumps(tool["output"])
            history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        extra = {}
    return messages, arguments


def responses_loop(stack: Stack, name: str, **extra: Any) -> tuple[list[Json], list[str]]:
    """The outputs of a run of the agent loop over Responses without state, and the arguments of its calls."""
    tool = TOOLS[name]
    function = {"name": name, "description": tool["about"], "parameters": tool["parameters"], "strict": False}
    history: list[Json] = [{"role": "user", "content": tool["asked"]}]
    outputs: list[Json] = []
    arguments: list[str] = []
    for _ in range(MAX_TURNS):
        answer = stack.answer(
            "/v1/responses",
            input=history,
            temperature=0,
            tools=[{"type": "function", **function}],
            max_output_tokens=400,
            **extra,
        )
        outputs.append(answer)
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        if not calls or answer["status"] == "incomplete":
            break
        history += answer["output"]
        for call in calls:
            arguments.append(call["arguments"])
            result = json.dumps(tool["output"])
            history.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        extra = {}
    return outputs, arguments


@pytest.mark.parametrize("name", NAMES)
def test_chat_carries_reasoning_as_the_compatibility_test_wants_it(stack: Stack, name: str) -> None:
    messages, arguments = chat_loop(stack, name)

    assert any(isinstance(message.get("reasoning"), str) and message["reasoning"] for message in messages)
    assert all(message["role"] == "assistant" and message["refusal"] is None for message in messages)
    if name == "get_system_health":  # the demo model may miss the others
        assert [json.loads(text) for text in arguments] == [{}]


@pytest.mark.parametrize("name", NAMES)
def test_responses_carry_reasoning_as_the_compatibility_test_wants_it(stack: Stack, name: str) -> None:
    outputs, arguments = responses_loop(stack, name)

    reasoning = [item for item in outputs[0]["output"] if item["type"] == "reasoning"]
    assert reasoning
    for item in reasoning:
        assert item["content"]
        assert all(part["type"] == "reasoning_text" and part["text"] for part in item["content"])
    if name == "get_system_health":
        assert [json.loads(text) for text in arguments] == [{}]


@pytest.mark.parametrize("loop", [chat_loop, responses_loop])
@pytest.mark.parametrize("name", ["get_weather", pytest.param("detect_language", marks=SLOW)])
def test_a_call_that_is_required_has_arguments_that_validate(stack: Stack, name: str, loop: Any) -> None:
    _, arguments = loop(stack, name, tool_choice="required")

    assert arguments
    jsonschema.validate(json.loads(arguments[0]), TOOLS[name]["parameters"])


@pytest.mark.parametrize("effort", ["low", pytest.param("high", marks=SLOW)])
def test_the_chat_sampler_of_the_evals_gets_text_reasoning_and_usage(
    client: openai.OpenAI, effort: Any
) -> None:
    response = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello there!"},
        ],
        reasoning_effort=effort,
        temperature=0.5,
        max_tokens=1024,
        seed=1,
    )

    message = response.choices[0].message
    assert message.content
    assert message.reasoning  # type: ignore[attr-defined]  # the sampler reads it in addition to the SDK's fields
    assert response.usage
    assert response.usage.completion_tokens > 0


def test_the_responses_sampler_of_the_evals_gets_items_with_text(client: openai.OpenAI) -> None:
    instructed: Any = [
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello there!"},
    ]
    request: Any = {"model": MODEL, "input": instructed, "extra_body": {"seed": 1}}  # so that it ends soon
    plain = client.responses.create(**request, temperature=1.0, max_output_tokens=131_072)
    effort = client.responses.create(**request, reasoning={"effort": "low"})
    none = client.responses.create(**request, reasoning=None)

    for response in (plain, effort, none):
        assert response.output_text
        assert response.usage
        # The sampler walks over the `content` of every item, reasoning and messages alike.
        assert all(part.text for item in response.output for part in item.content)
