"""Agent frameworks for Python: a session of two questions with a tool that they run themselves."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from agents import Agent as OpenAIAgent
from agents import (
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
)
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIModel, ToolCallingAgent, tool

from tests.clients.scene import QUESTIONS, ScriptedStack, check_session, read_note
from tests.stack import MODEL

Session = Callable[[str, bool], list[str]]


def pydantic_ai(model: Any, provider: Any, path: str, url: str, streams: bool) -> list[str]:
    agent = Agent(model(MODEL, provider=provider(base_url=url + path, api_key="any")), tools=[read_note])

    async def play() -> list[str]:
        answers, history = [], None
        for question in QUESTIONS:
            if streams:
                async with agent.run_stream(question, message_history=history) as run:
                    answers.append(await run.get_output())
                    history = run.all_messages()
            else:
                done = await agent.run(question, message_history=history)
                answers.append(done.output)
                history = done.all_messages()
        return answers

    return asyncio.run(play())


def langgraph(use_responses_api: bool, url: str, streams: bool) -> list[str]:
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=0,
        streaming=streams,
        use_responses_api=use_responses_api,
    )
    agent = create_react_agent(model, [read_note], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "1"}}
    return [
        agent.invoke({"messages": [("user", question)]}, thread)["messages"][-1].text
        for question in QUESTIONS
    ]


def llama_index(url: str, streams: bool) -> list[str]:
    llm = OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )
    agent = FunctionAgent(tools=[read_note], llm=llm, streaming=streams)

    async def play() -> list[str]:
        memory = Memory.from_defaults()
        return [str(await agent.run(question, memory=memory)) for question in QUESTIONS]

    return asyncio.run(play())


def smolagents(url: str, streams: bool) -> list[str]:
    model = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="any")
    agent = ToolCallingAgent(tools=[tool(read_note)], model=model, stream_outputs=streams)
    return [str(agent.run(question, reset=False)) for question in QUESTIONS]


def openai_agents(api: Any, url: str, streams: bool) -> list[str]:
    async def play() -> list[str]:
        model = api(MODEL, AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0))
        agent = OpenAIAgent(name="Reader", model=model, tools=[function_tool(read_note)])
        fields: Any = {"session": SQLiteSession("1"), "run_config": RunConfig(tracing_disabled=True)}
        answers = []
        for question in QUESTIONS:
            if streams:
                run = Runner.run_streamed(agent, question, **fields)
                async for _ in run.stream_events():
                    pass
                answers.append(run.final_output)
            else:
                answers.append((await Runner.run(agent, question, **fields)).final_output)
        return answers

    return asyncio.run(play())


CLIENTS: dict[str, Session] = {
    "pydantic_ai_chat": partial(pydantic_ai, OpenAIChatModel, OpenAIProvider, "/v1"),
    "pydantic_ai_responses": partial(pydantic_ai, PydanticResponsesModel, OpenAIProvider, "/v1"),
    "pydantic_ai_anthropic": partial(pydantic_ai, AnthropicModel, AnthropicProvider, ""),
    "langgraph_chat": partial(langgraph, False),
    "langgraph_responses": partial(langgraph, True),
    "llama_index": llama_index,
    "openai_agents_chat": partial(openai_agents, OpenAIChatCompletionsModel),
    "openai_agents_responses": partial(openai_agents, OpenAIResponsesModel),
}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("session", CLIENTS.values(), ids=CLIENTS)
def test_a_session_with_a_tool(scripted: ScriptedStack, session: Session, streams: bool) -> None:
    scripted.prompts()
    answers = session(scripted.stack.url, streams)
    check_session(scripted.prompts(), answers)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_smolagents_writes_its_calls_into_text(scripted: ScriptedStack, streams: bool) -> None:
    """So there is no call to which a thought could be given back."""
    scripted.prompts()
    answers = smolagents(scripted.stack.url, streams)
    prompts = scripted.prompts()
    check_session(prompts, answers, num_rounds=0)
    assert "Calling tools:" in prompts[-1]
