"""The OpenAI SDK against the running stack: chat, its streaming helper, structured output, Responses."""

import json
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel, Field

from tests.stack import MODEL

QUESTION = "Hey, quick check: is everything up and running?"
CHAT: Any = {"model": MODEL, "max_tokens": 300, "temperature": 0}
RESPONSE: Any = {"model": MODEL, "max_output_tokens": 300, "temperature": 0}
DESCRIPTION = (
    "Returns the current health status of the LLM runtime—use before critical operations to verify "
    "the service is live."
)
NOTHING: dict[str, object] = {"type": "object", "properties": {}}
CHAT_TOOL: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "get_system_health", "description": DESCRIPTION, "parameters": NOTHING},
}
RESPONSES_TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_system_health",
    "description": DESCRIPTION,
    "parameters": NOTHING,
    "strict": False,
}
RESULT = '{"status":"ok","uptime_seconds":372045}'
GREETING: ChatCompletionMessageParam = {"role": "user", "content": "Hello there!"}


class Report(BaseModel):
    """A report without free text, so that the demo model's answer is bounded."""

    healthy: bool
    mood: Literal["good", "bad"]
    score: int = Field(ge=0, le=9)


def test_a_tool_is_called_and_its_result_answered_over_two_chat_rounds(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(messages=messages, tools=[CHAT_TOOL], **CHAT)
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message.to_dict())  # the SDK's own way back into a request
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT})

    second = client.chat.completions.create(messages=messages, tools=[CHAT_TOOL], **CHAT)

    assert second.choices[0].message.content
    assert second.usage
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens


def test_the_chat_streaming_helper_gathers_what_create_answers(client: openai.OpenAI) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": QUESTION}], "tools": [CHAT_TOOL]}
    whole = client.chat.completions.create(**body).choices[0]

    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert "tool_calls.function.arguments.done" in kinds
    assert final.usage
    (choice,) = final.choices
    assert choice.finish_reason == whole.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert whole.message.tool_calls
    assert choice.message.tool_calls[0].function.name == "get_system_health"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {}
    assert getattr(choice.message, "reasoning", "") == getattr(whole.message, "reasoning", None)


def test_chat_parse_gives_the_model_of_the_answer_streamed_or_not(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=[GREETING], response_format=Report, **CHAT)
    with client.chat.completions.stream(messages=[GREETING], response_format=Report, **CHAT) as stream:
        streamed = stream.get_final_completion()

    assert isinstance(parsed.choices[0].message.parsed, Report)
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_a_tool_made_of_a_model_is_called_with_arguments_that_it_takes(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Report, name="get_system_health", description=DESCRIPTION)
    fields: Any = {"messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
    answer = client.chat.completions.parse(**fields, tool_choice="required", **CHAT)

    call = (answer.choices[0].message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, Report)


def test_the_sdk_raises_its_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=[GREETING])
    with pytest.raises(openai.BadRequestError, match="audio") as refused:
        client.chat.completions.create(
            model=MODEL, messages=[GREETING], audio={"format": "mp3", "voice": "alloy"}
        )
    assert refused.value.param == "audio"


def test_a_tool_is_called_and_its_result_answered_over_two_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(input=QUESTION, tools=[RESPONSES_TOOL], **RESPONSE)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}

    second = client.responses.create(
        input=[result], previous_response_id=first.id, tools=[RESPONSES_TOOL], **RESPONSE
    )

    assert first.output[0].type == "reasoning"
    assert second.output_text
    assert client.responses.retrieve(second.id).output == second.output
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "reasoning", "function_call", "function_call_output"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_the_responses_streaming_helper_gathers_what_create_answers(client: openai.OpenAI) -> None:
    whole = client.responses.create(input="Hello there!", **RESPONSE)

    with client.responses.stream(input="Hello there!", **RESPONSE) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()

    assert text == final.output_text == whole.output_text != ""
    assert final.usage
    assert whole.usage
    assert final.usage.total_tokens == whole.usage.total_tokens
    cached = [usage.input_tokens_details.cached_tokens for usage in (whole.usage, final.usage)]
    assert cached[0] <= cached[1] > 0  # the second prompt finds the KV of the first


def test_responses_parse_gives_the_model_of_the_answer_streamed_or_not(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(input="Hello there!", text_format=Report, **RESPONSE)
    with client.responses.stream(input="Hello there!", text_format=Report, **RESPONSE) as stream:
        streamed = stream.get_final_response()

    assert isinstance(parsed.output_parsed, Report)
    assert streamed.output_parsed == parsed.output_parsed


def test_a_background_stream_that_broke_off_is_resumed(client: openai.OpenAI) -> None:
    stream = client.responses.create(input=QUESTION, stream=True, background=True, **RESPONSE)
    seen = [next(stream) for _ in range(5)]
    stream.close()
    created = seen[0]
    assert created.type == "response.created"
    rest = client.responses.retrieve(
        created.response.id, stream=True, starting_after=seen[-1].sequence_number
    )
    events = [*seen, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(created.response.id).to_dict() == last.response.to_dict()
