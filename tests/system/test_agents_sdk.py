"""openai-agents against the running stack: both of its models, tools over several turns, streamed and not."""

from collections.abc import AsyncIterator
from typing import Literal

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    TResponseInputItem,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S

QUESTION = "Hey, quick check: is everything up and running?"
LOCAL = RunConfig(tracing_disabled=True)
SHORT = ModelSettings(temperature=0, max_tokens=300)
APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
MAINLY_RESPONSES = ["responses", pytest.param("chat", marks=pytest.mark.slow)]
CALLED = ["reasoning_item", "tool_call_item", "tool_call_output_item"]
ANSWERED = ["reasoning_item", "message_output_item"]


class Verdict(BaseModel):
    """Without free text, which the demo model may not end in time."""

    healthy: bool
    mood: Literal["good", "bad"]


@function_tool
def get_system_health() -> str:
    """Returns the current health status of the LLM runtime—use before critical operations to verify the
    service is live."""
    return '{"status":"ok","uptime_seconds":372045}'


@pytest.fixture
async def model(stack: Stack, api: str) -> AsyncIterator[Model]:
    url = f"{stack.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield APIS[api](MODEL, client)


def operator(model: Model, settings: ModelSettings = SHORT) -> Agent[None]:
    return Agent(name="Operator", model=model, tools=[get_system_health], model_settings=settings)


@pytest.mark.parametrize("api", APIS)
async def test_a_tool_turn_is_run_and_the_conversation_goes_on(model: Model) -> None:
    first = await Runner.run(operator(model), QUESTION, run_config=LOCAL)
    history: list[TResponseInputItem] = first.to_input_list()
    history.append({"role": "user", "content": QUESTION})
    second = await Runner.run(operator(model), history, run_config=LOCAL)

    assert [item.type for item in first.new_items] == [*CALLED, *ANSWERED]
    assert "372045" in first.final_output
    assert second.final_output
    usage = first.context_wrapper.usage
    assert usage.requests == 2
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


@pytest.mark.parametrize("api", MAINLY_RESPONSES)
async def test_a_streamed_tool_turn_gives_the_same_items_and_text(model: Model) -> None:
    whole = await Runner.run(operator(model), QUESTION, run_config=LOCAL)
    run = Runner.run_streamed(operator(model), QUESTION, run_config=LOCAL)
    raw = [event.data.type async for event in run.stream_events() if event.type == "raw_response_event"]

    assert [item.type for item in run.new_items] == [*CALLED, *ANSWERED]
    assert run.final_output == whole.final_output
    assert raw.count("response.completed") == 2
    assert raw.count("response.output_text.delta") > 1
    assert "response.reasoning_text.delta" in raw


@pytest.mark.parametrize("api", MAINLY_RESPONSES)
async def test_an_agent_has_a_typed_output(model: Model) -> None:
    judge = Agent(name="Judge", model=model, output_type=Verdict, model_settings=SHORT)
    run = await Runner.run(judge, "Hello there!", run_config=LOCAL)

    assert isinstance(run.final_output, Verdict)
