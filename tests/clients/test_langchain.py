"""LangChain's ChatOpenAI against the running stack: tools, streaming, structured output."""

from typing import Literal

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.stack import MODEL, Stack

QUESTION = HumanMessage("Hey, quick check: is everything up and running?")
# Both APIs that LangChain speaks.
APIS = {"chat completions": False, "responses": True}


class Report(BaseModel):
    """Health."""

    healthy: bool
    mood: Literal["good", "bad"]
    score: int = Field(ge=0, le=9)


def get_system_health() -> str:
    """Returns the current health status of the LLM runtime—use before critical operations to verify the
    service is live."""
    return '{"status":"ok","uptime_seconds":372045}'


HEALTH = StructuredTool.from_function(get_system_health)


@pytest.fixture(params=APIS)
def model(stack: Stack, request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{stack.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=300,
        max_retries=0,
        use_responses_api=APIS[request.param],
    )


def test_bound_tools_are_called_and_their_results_answered(model: ChatOpenAI) -> None:
    bound = model.bind_tools([HEALTH])
    messages: list[BaseMessage] = [QUESTION]

    first = bound.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, ToolMessage(get_system_health(), tool_call_id=call["id"])]
    second = bound.invoke(messages)

    assert (call["name"], call["args"]) == ("get_system_health", {})
    assert "372045" in second.text
    assert second.usage_metadata["output_token_details"]["reasoning"] > 0


def test_a_stream_adds_up_to_the_whole_answer(model: ChatOpenAI) -> None:
    bound = model.bind_tools([HEALTH])

    whole = bound.invoke([QUESTION])
    chunks = list(bound.stream([QUESTION]))
    gathered = chunks[0]
    for chunk in chunks[1:]:
        gathered += chunk

    assert [(call["name"], call["args"]) for call in gathered.tool_calls] == [
        (call["name"], call["args"]) for call in whole.tool_calls
    ]
    greeting = [HumanMessage("Hello there!")]
    assert "".join(chunk.text for chunk in model.stream(greeting)) == model.invoke(greeting).text != ""


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_the_model_asked_for(model: ChatOpenAI, method: str) -> None:
    structured = model.with_structured_output(Report, method=method)

    assert isinstance(structured.invoke([QUESTION]), Report)
