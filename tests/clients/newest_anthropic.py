"""The newest release of Anthropic's SDK for Python, in a process of its own: its tool runner and its threads.

Both send only new messages as long as the server lets them. Plays the scene in the variables SCENE, BASE_URL
and MODEL, and prints the answers."""

import json
import os
import sys
from typing import Any

import anthropic

SCENE = json.loads(os.environ["SCENE"])
CLIENT: Any = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="any", max_retries=0)
ASKED: dict[str, Any] = {"model": os.environ["MODEL"], "max_tokens": 1000}
STREAMS = sys.argv[2] == "streamed"
MESSAGES: list[Any] = []


def read_note(name: str) -> str:
    """Reads a note.

    Args:
        name: The note's name, a colour."""
    return str(SCENE["NOTES"][name])


TOOL: Any = anthropic.beta_tool(read_note)


def with_runner(question: str) -> Any:
    MESSAGES.append({"role": "user", "content": question})
    runner = CLIENT.beta.messages.tool_runner(**ASKED, tools=[TOOL], messages=MESSAGES, stream=STREAMS)
    for turn in runner:
        message = turn.get_final_message() if STREAMS else turn
        MESSAGES.append({"role": "assistant", "content": message.content})
        results = runner.generate_tool_call_response()
        MESSAGES.extend([] if results is None else [results])
    return message


THREAD: Any = CLIENT.beta.messages.thread(**ASKED, tools=[TOOL.to_dict()])


def send(content: Any) -> Any:
    message = {"role": "user", "content": content}
    if not STREAMS:
        return THREAD.send(message)
    with THREAD.stream(message) as stream:
        return stream.get_final_message()


def with_thread(question: str) -> Any:
    message = send(question)
    while message.stop_reason == "tool_use":
        uses = [block for block in message.content if block.type == "tool_use"]
        message = send(
            [
                {"type": "tool_result", "tool_use_id": use.id, "content": read_note(**use.input)}
                for use in uses
            ]
        )
    return message


answered = {"runner": with_runner, "thread": with_thread}[sys.argv[1]]
answers = [answered(question) for question in SCENE["QUESTIONS"]]
print(json.dumps([block.text for message in answers for block in message.content if block.type == "text"]))  # noqa: T201
