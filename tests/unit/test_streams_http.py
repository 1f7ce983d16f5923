"""The first byte of a stream, keep-alive comments and late failures, alike in all three APIs."""

import asyncio
from typing import Any

import pytest

from baton.errors import EngineFailure
from frontend.http.answer import KEEP_ALIVE
from tests.scripted_frontend import MODEL, Client, Reply, ScriptedTokens
from tests.waiting import PATIENCE_S

BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "store": False},
}


def streamed(path: str, **script: Any) -> Reply:
    """A stream whose model says nothing until the client has got two comments."""

    async def scenario() -> Reply:
        tokens = ScriptedTokens("<|channel|>final<|message|>Hello", pause_at=0, **script)
        client = Client(tokens, first_event_wait_s=0.001, keep_alive_s=0.001)
        written = bytearray()

        def read(data: bytes) -> None:
            written.extend(data)
            if written.count(KEEP_ALIVE) == 2:
                tokens.go_on.set()

        client.on_write = read
        body = {"model": MODEL, "stream": True, **BODIES[path]}
        return await asyncio.wait_for(client.post(path, body), PATIENCE_S)

    return asyncio.run(scenario())


@pytest.mark.parametrize("path", BODIES)
def test_a_long_prefill_begins_its_stream_with_a_comment(path: str) -> None:
    reply = streamed(path)
    assert reply.status == 200
    assert reply.writes[0].endswith(KEEP_ALIVE)
    assert b"lo" in reply.body.rpartition(KEEP_ALIVE)[2]


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_the_first_byte_is_an_error_event_and_the_end(path: str) -> None:
    reply = streamed(path, fail_at=0, error=EngineFailure("The engine broke."))
    assert reply.status == 200
    last = reply.events[-1]
    assert last.get("response", last)["error"]["message"] == "The engine broke."
    assert reply.body.count(b"The engine broke.") == 1
    assert b"[DONE]" not in reply.body
