"""An answer on its way to a client that reads slowly, not at all, or has left; and what is counted of it."""

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from baton.errors import EngineFailure
from frontend.http.answer import KEEP_ALIVE
from frontend.http.respond import Delivery
from tests.alive import Newborn
from tests.clock import jumping, now_s
from tests.generators import none_abandoned
from tests.scripted_frontend import BODIES, MODEL, Client, ScriptedTokens

ANSWER = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
)
ROUTE = "/v1/chat/completions"


class Slow:
    """A client that takes the first `num_taken` messages of an answer and no more until it `goes_on`."""

    def __init__(self, client: Client, num_taken: int = 1000) -> None:
        self.messages: list[Any] = []
        self.goes_on = asyncio.Event()
        self._client = client
        self._num_taken = num_taken

    async def ask(self, path: str = ROUTE, **fields: Any) -> None:
        """Send a request, by default to chat, and wait until its answer has ended."""
        self._client.take = self._take
        await self._client.post(path, {"model": MODEL, **BODIES[path], "store": True, **fields})

    async def _take(self, message: Any) -> None:
        if len(self.messages) >= self._num_taken:
            await self.goes_on.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def requests(client: Client, status: str) -> float:
    return client.metric("baton_requests_total", route=ROUTE, model=MODEL, status=status)


@pytest.mark.parametrize("stream", [False, True])
@jumping
async def test_a_client_that_does_not_read_is_left_half_a_minute_after_the_deadline(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER), request_timeout_s=100.0)
    slow = Slow(client, num_taken=1)
    await slow.ask(stream=stream)
    assert now_s() == pytest.approx(130)
    assert len(slow.messages) == 1
    assert client.tokens.num_ended == 1
    assert requests(client, "499") == 1


@pytest.mark.parametrize(("pause_at", "stream"), [(0, False), (30, False), (0, True), (30, True)])
@jumping
async def test_the_deadline_ends_an_answer_when_it_is_over_and_not_later(pause_at: int, stream: bool) -> None:
    tokens = ScriptedTokens(ANSWER, pause_at=pause_at)
    client = Client(tokens, request_timeout_s=100.0)
    slow = Slow(client)
    await slow.ask(stream=stream)
    assert now_s() == pytest.approx(100)
    assert b'"code":"deadline_exceeded"' in slow.body
    assert tokens.requests[0].deadline_s == 100
    assert tokens.num_ended == 1
    assert requests(client, "504") == 1


@pytest.mark.parametrize(("pause_at", "stream"), [(0, True), (30, False)])
@jumping
async def test_a_client_that_leaves_is_noticed_at_once_and_its_tokens_count(
    pause_at: int, stream: bool
) -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=pause_at))
    answering = asyncio.create_task(Slow(client).ask(stream=stream))
    await asyncio.sleep(5)  # virtual time
    client.gone.set_result(None)
    await answering
    assert now_s() == pytest.approx(5)
    assert client.tokens.num_ended == 1
    assert client.metric("baton_disconnects_total", route=ROUTE) == 1
    assert client.metric("baton_completion_tokens_total", model=MODEL) == pause_at


@pytest.mark.parametrize("stops", [False, True])
@jumping
async def test_a_client_that_leaves_at_its_deadline_is_one_end(stops: bool) -> None:
    alone = asyncio.all_tasks()
    client = Client(ScriptedTokens(ANSWER, pause_at=30), request_timeout_s=100.0)
    answering = asyncio.create_task(Slow(client).ask(stream=True))
    await asyncio.sleep(100)  # virtual time
    client.gone.set_result(None)
    if stops:  # then a server that must stop, too
        answering.cancel()
    await asyncio.wait([answering])
    assert answering.exception() is None
    assert now_s() < 102
    assert client.tokens.num_ended == 1
    assert requests(client, "503" if stops else "499") == 1
    assert asyncio.all_tasks() == alone


@pytest.mark.parametrize(("num_taken", "stream"), [(0, False), (2, True)])
@jumping
async def test_a_server_that_must_stop_waits_a_second_for_a_client_that_does_not_read(
    num_taken: int, stream: bool
) -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=30))
    answering = asyncio.create_task(Slow(client, num_taken).ask(stream=stream))
    await asyncio.sleep(1)  # it waits for the engine, or for the client
    began_s = now_s()
    answering.cancel()
    await asyncio.wait([answering])
    assert now_s() - began_s == pytest.approx(1)
    assert client.tokens.num_ended == 1
    assert client.metric("baton_running_requests", route=ROUTE) == 0


@pytest.mark.parametrize("stops", [False, True])
@jumping
async def test_a_stored_answer_stays_completed_although_its_end_is_not_read(stops: bool) -> None:
    client = Client(ScriptedTokens(ANSWER))
    whole = Slow(client)
    await whole.ask("/v1/responses", stream=True)
    slow = Slow(client, len(whole.messages) - 1)
    answering = asyncio.create_task(slow.ask("/v1/responses", stream=True))
    await asyncio.sleep(1)  # all but the end is sent
    if stops:
        answering.cancel()
    await asyncio.wait([answering])
    created = msgspec.json.decode(slow.body.split(b"data: ", 1)[1].split(b"\n", 1)[0])
    client.take = None
    stored = await client.get(f"/v1/responses/{created['response']['id']}")
    assert stored.json["status"] == "completed"
    await client.responses.close()


@pytest.mark.parametrize("stream", [False, True])
@jumping
async def test_a_server_that_must_stop_sends_an_error_and_counts_it(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=30))
    slow = Slow(client)
    answering = asyncio.create_task(slow.ask(stream=stream))
    await client.tokens.paused.wait()
    await asyncio.sleep(1)  # the client has what came before
    answering.cancel()
    await asyncio.wait([answering])
    assert answering.exception() is None  # which the server would log with its traceback
    assert b"The server is shutting down" in slow.body
    starts = [each for each in slow.messages if each["type"] == "http.response.start"]
    assert [each["status"] for each in starts] == [200 if stream else 503]
    assert slow.messages[-1]["more_body"] is False
    assert requests(client, "503") == 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_neither_cached_nor_held_back_by_proxies(path: str) -> None:
    reply = await Client(ScriptedTokens(ANSWER)).post(path, {"model": MODEL, "stream": True, **BODIES[path]})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")


@jumping
async def test_a_generation_far_ahead_of_its_client_waits_for_it() -> None:
    text = "<|channel|>final<|message|>" + "x" * 3900
    client = Client(ScriptedTokens(text))
    slow = Slow(client, num_taken=2)
    answering = asyncio.create_task(slow.ask(stream=True, logprobs=True, top_logprobs=2, n=4))
    await asyncio.sleep(50)  # virtual time
    assert client.tokens.num_ended < 4
    slow.goes_on.set()
    await answering
    assert client.tokens.num_ended == 4
    assert slow.body.endswith(b"[DONE]\n\n")
    assert slow.body.count(b'"content":"x') > 4000


@jumping
async def test_a_stream_begins_soon_and_sends_comments_while_it_is_idle() -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=0))
    slow = Slow(client)
    answering = asyncio.create_task(slow.ask(stream=True))
    await asyncio.sleep(0.09)  # virtual time
    assert not slow.messages
    await asyncio.sleep(0.02)  # virtual time
    assert slow.body.endswith(KEEP_ALIVE)
    await asyncio.sleep(35)  # virtual time
    assert slow.body.count(KEEP_ALIVE) == 4
    client.tokens.go_on.set()
    await answering
    assert slow.body.endswith(b"[DONE]\n\n")


@pytest.mark.parametrize(("stream", "leaves"), [(False, False), (True, False), (True, True)])
@jumping
async def test_an_answer_that_has_ended_leaves_nothing_behind(stream: bool, leaves: bool) -> None:
    alone, deliveries = asyncio.all_tasks(), Newborn(Delivery)
    client = Client(ScriptedTokens(ANSWER, pause_at=30 if leaves else None), request_timeout_s=1000.0)
    with none_abandoned():
        gc.disable()  # a long answer would be kept until objects of its age are collected
        answering = asyncio.create_task(Slow(client).ask(stream=stream))
        await asyncio.sleep(1)  # virtual time
        client.gone.set_result(None)
        await answering
        del answering
        tasks = asyncio.all_tasks()
        await asyncio.sleep(1)  # a cancelled task lets go of its frame a turn later
        left = deliveries.uncollected()
        gc.enable()
    assert tasks == alone
    assert left == []


@pytest.mark.parametrize("stream", [False, True])
@jumping
async def test_a_choice_that_fails_ends_the_others_and_the_answer(stream: bool) -> None:
    client = Client(ScriptedTokens(ANSWER, fail_at=0, error=EngineFailure("Broken.")))
    slow = Slow(client)
    with none_abandoned():
        await slow.ask(stream=stream, n=3)
    assert slow.messages[0]["status"] == 500
    assert slow.body.count(b"Broken.") == 1
    assert client.tokens.num_ended == 3
    assert requests(client, "500") == 1
