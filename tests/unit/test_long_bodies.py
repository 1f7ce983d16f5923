"""Long bodies are read in a thread, and refused before they cost much."""

import asyncio
import threading
from typing import Any

import pytest

from frontend.http.body import LONG_BYTES, MAX_EXPLAINED_BYTES, read
from frontend.turn import prepare
from tests.scripted_frontend import MODEL, Client, ScriptedTokens

PROMPTS: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text, "store": False},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 9},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
}


def test_only_long_bodies_are_read_in_a_thread() -> None:
    async def where(num_bytes: int) -> int:
        return await read(bytes(num_bytes), lambda raw: threading.get_ident() if len(raw) == num_bytes else 0)

    own = threading.get_ident()
    assert asyncio.run(where(LONG_BYTES)) == own
    assert asyncio.run(where(LONG_BYTES + 1)) not in {0, own}


def test_a_fault_in_a_long_body_is_named_by_the_decoder() -> None:
    async def scenario() -> None:
        client = Client(ScriptedTokens())
        for num_bytes, param in ((10, "messages[1].role"), (MAX_EXPLAINED_BYTES, None)):
            messages = [{"role": "user", "content": "x" * num_bytes}, {"role": 7, "content": "Hi"}]
            reply = await client.chat(messages=messages)
            assert (reply.status, reply.error["param"]) == (400, param)
            assert "messages[" in reply.error["message"]

    asyncio.run(scenario())


async def num_turns(path: str, body: dict[str, Any]) -> int:
    """The turns of the event loop that a refusal takes: one, unless another thread has worked on it."""
    asking = asyncio.create_task(Client(ScriptedTokens("")).post(path, body))
    count = 0
    while not asking.done():
        await asyncio.sleep(0)  # one turn of the loop, counted
        count += 1
    assert (await asking).status == 400
    return count


@pytest.mark.parametrize("path", PROMPTS)
def test_long_bodies_and_prompts_do_not_hold_up_the_loop(path: str) -> None:
    for num_bytes, in_thread in ((10, False), (LONG_BYTES, True)):
        body = {"model": 7, "pad": "x" * num_bytes}
        assert (asyncio.run(num_turns(path, body)) > 1) == in_thread
    too_long = "x" * (prepare.LONG_BYTES + 1000)
    assert asyncio.run(num_turns(path, {"model": MODEL, **PROMPTS[path](too_long)})) > 1
