"""How streams begin: no status before a worker has taken them, then comments; and who waits in whose turn."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from baton.errors import BatonError, EngineFailure, NoWorkers, Overloaded
from baton.messages import GenerateRequest, TokenChunk
from frontend.http.answer import KEEP_ALIVE
from frontend.messages.answer import PING
from frontend.record import Leg
from tests.clock import now_s, run_jumping
from tests.scripted_frontend import BODIES, MODEL, Client, Reply, ScriptedTokens

TEXT = "<|channel|>final<|message|>Hello<|return|>"


class QueuedTokens(ScriptedTokens):
    """Choice *i* is taken, or refused, after `waits_s[i]`; its first token comes a minute later."""

    def __init__(self, *waits_s: float, refusal: BatonError | None = None) -> None:
        super().__init__(TEXT)
        self.waits_s = waits_s
        self.refusal = refusal

    async def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None], leg: Leg
    ) -> AsyncGenerator[TokenChunk, None]:
        await asyncio.sleep(self.waits_s[request.sampling.choice])
        if self.refusal is not None:
            raise self.refusal
        on_taken()
        await asyncio.sleep(60)
        async for chunk in super().generate(request, caller, lambda: None, leg):
            yield chunk


def streamed(tokens: QueuedTokens, path: str = "/v1/chat/completions", **fields: Any) -> tuple[Reply, float]:
    """The reply, and when its first byte came."""

    async def main() -> tuple[Reply, float]:
        client, at_s = Client(tokens), []
        client.on_write = lambda _: at_s.append(now_s())
        reply = await client.post(path, {"model": MODEL, "stream": True, **BODIES[path], **fields})
        return reply, at_s[0]

    return run_jumping(main())


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_when_a_worker_has_taken_it(path: str) -> None:
    reply, first_byte_s = streamed(QueuedTokens(30), path)
    assert reply.status == 200
    assert first_byte_s == pytest.approx(30.1, abs=0.05)
    assert b"Hello" in reply.body or b"lo" in reply.body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("refusal", "status"),
    [(Overloaded("Full.", retry_after_s=6.2), 429), (NoWorkers("Gone.", retry_after_s=6.2), 503)],
)
def test_a_stream_that_no_worker_takes_is_a_status_with_the_time_to_come_back(
    path: str, refusal: BatonError, status: int
) -> None:
    reply, _ = streamed(QueuedTokens(30, refusal=refusal), path)
    assert (reply.status, reply.headers["retry-after"]) == (status, "7")
    assert reply.error["message"] == refusal.message


def test_a_stream_of_two_choices_begins_when_both_are_taken() -> None:
    reply, first_byte_s = streamed(QueuedTokens(1, 40), n=2)
    assert reply.status == 200
    assert first_byte_s == pytest.approx(40.1, abs=0.05)


@pytest.mark.parametrize("path", [*BODIES][:3])
def test_users_of_a_key_take_turns_and_without_either_addresses_do(path: str) -> None:
    async def main() -> list[str]:
        tokens = QueuedTokens(0)
        client = Client(tokens)
        body = {"model": MODEL, **BODIES[path]}
        key = {"authorization": "Bearer k"}
        for fields, headers in [
            ({}, {}),
            ({}, key),
            ({"user": "ann"}, key),
            ({"user": "c" * 10**6}, key),
            ({"user": "ann", "safety_identifier": "bob"}, key),
            ({"safety_identifier": "bob"}, {}),
        ]:
            assert (await client.post(path, {**body, **fields}, headers)).status == 200
        return tokens.callers

    address, key, ann, long, bob, bob_without = run_jumping(main())
    assert address == "127.0.0.1"
    assert "Bearer" not in key, "a digest"
    assert (ann, bob, bob_without) == (key + "ann", key + "bob", "\nbob")
    assert long == key + "c" * 256, "a queue may hold many"


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_first_byte_is_an_error_event_and_the_end(path: str) -> None:
    """The model says nothing until the client has got three comments, or pings."""
    tokens = ScriptedTokens(TEXT, pause_at=0, fail_at=0, error=EngineFailure("The engine broke."))
    client = Client(tokens, first_event_wait_s=0.001, keep_alive_s=0.001)
    written, beat = bytearray(), PING if path == "/v1/messages" else KEEP_ALIVE

    def read(data: bytes) -> None:
        written.extend(data)
        if written.count(beat) == 3:
            tokens.go_on.set()

    client.on_write = read
    reply = await client.post(path, {"model": MODEL, "stream": True, **BODIES[path]})
    assert reply.status == 200
    assert reply.writes[0].endswith(beat)
    last = reply.events[-1]
    assert last.get("response", last)["error"]["message"] == "The engine broke."
    assert reply.body.count(b"The engine broke.") == 1
    assert b"[DONE]" not in reply.body
