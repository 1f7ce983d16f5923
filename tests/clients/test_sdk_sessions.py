"""SDKs for Python: a session of two questions, the tool run in the loop of their guides, streamed and not."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.scene import QUESTIONS, ScriptedStack, check_program, check_session, read_note
from tests.stack import MODEL

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; otherwise it asks the network
import litellm

Json = dict[str, Any]
Session = Callable[[str, bool], list[str]]

PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FUNCTION = {"name": "read_note", "description": "Reads a note.", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


def anthropic_messages(url: str, streams: bool) -> list[str]:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    tools = [{"name": "read_note", "description": "Reads a note.", "input_schema": PARAMETERS}]
    messages: list[Any] = []
    asked: Json = {"model": MODEL, "max_tokens": 1000, "messages": messages, "tools": tools}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 500}

    def ask() -> anthropic.types.Message:
        if not streams:
            return client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            return stream.get_final_message()

    def answered(question: str) -> str:
        messages.append({"role": "user", "content": question})
        while (message := ask()).stop_reason == "tool_use":
            messages.append({"role": "assistant", "content": message.content})
            (use,) = [block for block in message.content if block.type == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": use.id, "content": read_note(**use.input)}
            messages.append({"role": "user", "content": [result]})
        messages.append({"role": "assistant", "content": message.content})
        return "".join(block.text for block in message.content if block.type == "text")

    return [answered(question) for question in QUESTIONS]


def openai_chat(url: str, streams: bool) -> list[str]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)

    def ask(messages: list[Any]) -> Any:
        if not streams:
            return client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            return stream.get_final_completion().choices[0]

    return chat_loop(ask)


def litellm_chat(url: str, streams: bool) -> list[str]:
    asked: Json = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "any", "tools": TOOLS}

    def ask(messages: list[Any]) -> Any:
        answer = litellm.completion(messages=messages, stream=streams, num_retries=0, **asked)
        if streams:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0]

    return chat_loop(ask)


def chat_loop(ask: Callable[[list[Any]], Any]) -> list[str]:
    messages: list[Any] = []

    def answered(question: str) -> str:
        messages.append({"role": "user", "content": question})
        while (choice := ask(messages)).finish_reason == "tool_calls":
            (called,) = choice.message.tool_calls
            text = read_note(**json.loads(called.function.arguments))
            messages.extend([choice.message, {"role": "tool", "tool_call_id": called.id, "content": text}])
        messages.append(choice.message)
        return str(choice.message.content)

    return [answered(question) for question in QUESTIONS]


def openai_responses(url: str, streams: bool) -> list[str]:
    """The server keeps the conversation."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    tools: list[Any] = [{"type": "function", "strict": False, **FUNCTION}]
    previous: str | None = None

    def ask(given: list[Any]) -> Any:
        nonlocal previous
        asked: Json = {"model": MODEL, "input": given, "tools": tools, "previous_response_id": previous}
        answer: Any
        if streams:
            with client.responses.stream(**asked) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**asked)
        previous = answer.id
        return answer

    def answered(question: str) -> str:
        answer = ask([{"role": "user", "content": question}])
        while calls := [item for item in answer.output if item.type == "function_call"]:
            text = read_note(**json.loads(calls[0].arguments))
            answer = ask([{"type": "function_call_output", "call_id": calls[0].call_id, "output": text}])
        return str(answer.output_text)

    return [answered(question) for question in QUESTIONS]


CLIENTS: list[Session] = [anthropic_messages, openai_chat, openai_responses, litellm_chat]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("session", CLIENTS)
def test_a_session_with_a_tool(scripted: ScriptedStack, session: Session, streams: bool) -> None:
    scripted.prompts()
    answers = session(scripted.stack.url, streams)
    check_session(scripted.prompts(), answers)


# Where other clients need an older release, the newest one is in a folder of its own.
NEWEST = Path(sys.prefix) / "newest"


@pytest.mark.skipif(not NEWEST.is_dir(), reason="make test-clients installs the newest release")
@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize("api", ["runner", "thread"])
def test_the_newest_anthropic_plays_its_tool_runner_and_its_threads(
    scripted: ScriptedStack, api: str, mode: str
) -> None:
    program = Path(__file__).parent / "newest_anthropic.py"
    check_program(scripted, [sys.executable, str(program), api, mode], {"PYTHONPATH": str(NEWEST)})
