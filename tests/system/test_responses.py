"""The Responses API over real processes: a stateful tool conversation, across restarts of the frontend."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.stack import MODEL, Process, Stack

TOOL: Any = {
    "type": "function",
    "name": "get_system_health",
    "description": "Returns the current health status of the LLM runtime—use before critical operations "
    "to verify the service is live.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
QUESTION = "Hey, quick check: is everything up and running?"
ASKED: Any = {"model": MODEL, "tools": [TOOL], "reasoning": {"effort": "low"}, "temperature": 0}


@pytest.fixture(scope="module")
def stack(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The shared workers of the demo model; the test starts the frontend."""
    environ = {"BATON_FILE_REGISTRY": stack.environ["BATON_FILE_REGISTRY"]}
    with Stack(tmp_path_factory.mktemp("stack"), environ) as own:
        yield own


@pytest.fixture
def frontend(stack: Stack) -> Process:
    """A running frontend."""
    return start(stack)


def start(stack: Stack) -> Process:
    for process in stack.processes:
        if process.name == "frontend":
            process.kill()
    process = stack.frontend()
    stack.wait_ready(1, 1)
    return process


def result_of(response: Any) -> Any:
    """The output for the one call of a response."""
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("get_system_health", {})
    output = '{"status":"ok","uptime_seconds":372045}'
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def test_a_tool_conversation_goes_on_over_a_restart(
    stack: Stack, frontend: Process, client: openai.OpenAI
) -> None:
    first = client.responses.create(input=QUESTION, **ASKED)
    assert first.output[0].type == "reasoning"
    assert first.output[0].content

    frontend.signal(signal.SIGTERM)
    assert frontend.wait() == 0
    start(stack)

    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    with client.responses.stream(input=[result_of(first)], previous_response_id=first.id, **ASKED) as stream:
        second = stream.get_final_response()
    assert "372045" in second.output_text
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items][:2] == ["message", "reasoning"]
    assert items[-1].type == "function_call_output"
    again = client.responses.create(input=[result_of(first)], previous_response_id=first.id, **ASKED)
    assert again.output_text == second.output_text


@pytest.mark.usefixtures("frontend")
def test_a_stream_that_broke_off_is_resumed(client: openai.OpenAI) -> None:
    stream = client.responses.create(input=QUESTION, stream=True, background=True, **ASKED)
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
    assert last.type == "response.completed"
    stored = client.responses.retrieve(created.response.id)
    assert stored.to_dict() == last.response.to_dict()
