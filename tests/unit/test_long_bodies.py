"""Long bodies are read in a thread, and refused before they cost much."""

import asyncio
import threading

from frontend.http.body import LONG_BYTES, MAX_EXPLAINED_BYTES, read
from tests.scripted_frontend import Client, ScriptedTokens


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
