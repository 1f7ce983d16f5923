"""LiteLLM's SDK against the running stack: completion, streaming, tools, Responses."""

import os
from typing import Any

import pytest

from tests.stack import MODEL, Stack

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = (
    "True"  # read at import; otherwise it asks the network for prices
)
import litellm

QUESTION = {"role": "user", "content": "Hey, quick check: is everything up and running?"}
RESULT = '{"status":"ok","uptime_seconds":372045}'
FUNCTION = {
    "name": "get_system_health",
    "description": "Returns the current health status of the LLM runtime—use before critical operations to "
    "verify the service is live.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {
    "type": "object",
    "properties": {"healthy": {"type": "boolean"}},
    "required": ["healthy"],
    "additionalProperties": False,
}


# LiteLLM's routes to an OpenAI-compatible server: its generic one, and the one for vLLM.
@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request: pytest.FixtureRequest, stack: Stack) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": f"{stack.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 300,
        "num_retries": 0,
        "timeout": 60,
    }


def test_a_tool_is_called_and_its_result_answered(asked: dict[str, Any]) -> None:
    first = litellm.completion(messages=[QUESTION], tools=[TOOL], **asked).choices[0]
    (call,) = first.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    second = litellm.completion(messages=[QUESTION, first.message, result], tools=[TOOL], **asked)

    assert first.finish_reason == "tool_calls"
    assert (call.function.name, call.function.arguments) == ("get_system_health", "{}")
    assert first.message.reasoning_content
    assert "372045" in second.choices[0].message.content
    assert second.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_stream_adds_up_to_the_whole_answer(asked: dict[str, Any]) -> None:
    whole = litellm.completion(messages=[QUESTION], tools=[TOOL], **asked)
    usage = {"include_usage": True}
    chunks = litellm.completion(messages=[QUESTION], tools=[TOOL], stream=True, stream_options=usage, **asked)
    gathered = litellm.stream_chunk_builder(list(chunks))

    one, other = gathered.choices[0].message, whole.choices[0].message
    assert [call.function for call in one.tool_calls] == [call.function for call in other.tool_calls]
    assert one.reasoning_content == other.reasoning_content
    assert gathered.choices[0].finish_reason == "tool_calls"
    assert gathered.usage.total_tokens == whole.usage.total_tokens


def test_structured_output_follows_the_schema(asked: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}}

    answer = litellm.completion(messages=[QUESTION], response_format=form, **asked)

    assert answer.choices[0].message.content.replace(" ", "") in ('{"healthy":true}', '{"healthy":false}')


def test_a_refused_body_is_litellms_bad_request(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="moderation"):
        litellm.completion(messages=[QUESTION], extra_body={"moderation": {"model": "m"}}, **asked)


def test_responses_are_answered_and_streamed(stack: Stack) -> None:
    asked = {"model": f"openai/{MODEL}", "api_base": f"{stack.url}/v1", "api_key": "none", "temperature": 0}

    whole = litellm.responses(input="Hello there!", max_output_tokens=300, **asked)
    events = list(litellm.responses(input="Hello there!", max_output_tokens=300, stream=True, **asked))

    assert [item.type for item in whole.output] == ["reasoning", "message"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output[1].content[0].text != ""
    assert events[-1].type == "response.completed"
