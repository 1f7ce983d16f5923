"""Runs in the background: how many there may be, how long they may take, and what is left of them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import NotReady
from frontend.responses import runs
from frontend.responses.runs import MAX_RUNS, CallRun, ResponseState
from frontend.responses.store import ResponseStore
from tests.clock import jumping
from tests.scripted_frontend import MODEL, Client, ScriptedTokens, ended, frontend
from tests.stored_responses import response

ANSWER = "<|channel|>final<|message|>Hello<|return|>"


async def test_a_run_beyond_the_limit_is_refused() -> None:
    assert MAX_RUNS == 1000
    async with frontend(ANSWER, script={"pause_at": 0}) as client:
        made = (await client.respond(background=True)).json
        running = client.responses._runs  # noqa: SLF001  a thousand real ones take seconds
        others = [f"other {i}" for i in range(MAX_RUNS - 2)]
        running |= dict.fromkeys(others, running[made["id"]])
        together = await asyncio.gather(*(client.respond(background=True) for _ in range(2)))
        assert {reply.status for reply in together} == {200, 429}
        one_more = await client.respond(background=True)
        assert (one_more.status, one_more.error["code"]) == (429, "overloaded")
        assert one_more.headers["retry-after"] == "5"
        assert (await client.post(f"/v1/responses/{made['id']}/cancel", {})).status == 200
        assert (await client.respond(background=True)).status == 200
        for other in others:
            del running[other]


@jumping
async def test_a_run_and_its_stream_fail_at_its_deadline() -> None:
    client = Client(ScriptedTokens(ANSWER, pause_at=5), request_timeout_s=600.0)
    streamed = await client.respond(background=True, stream=True)
    assert streamed.events[-1]["type"] == "response.failed"
    assert asyncio.get_running_loop().time() == pytest.approx(600.0)
    failed = await ended(client, streamed.events[0]["response"]["id"])
    assert failed["error"]["code"] == "server_error"
    assert "deadline" in failed["error"]["message"]
    assert client.tokens.num_ended == 1
    labels = {"route": "background", "model": MODEL}
    assert client.metric("baton_requests_total", **labels, status="504") == 1
    assert client.metric("baton_running_requests", route="background") == 0
    await client.responses.close()


async def test_a_stream_that_is_too_long_is_not_stored_and_cannot_be_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "MAX_STREAM_BYTES", 3000)
    async with frontend(ANSWER) as client:
        streamed = await client.respond(background=True, stream=True)
        last = streamed.events[-1]
        assert (last["type"], last["sequence_number"]) == ("response.completed", len(streamed.events) - 1)
        late = await client.get(f"/v1/responses/{last['response']['id']}?stream=true")
        assert (late.status, late.error["param"]) == (400, "stream")


EVENTS = b'event: a\ndata: {"sequence_number":4}\n\n'


@asynccontextmanager
async def beside(call_run: CallRun, path: Path) -> AsyncIterator[tuple[Client, ResponseStore]]:
    """A frontend, and the store of another process that runs the response `theirs`."""
    theirs = ResponseStore(str(path / "responses.sqlite3"), address="unix:@theirs")
    await theirs.save(response("theirs", status="in_progress", is_background=True), [])
    state = ResponseState(ResponseStore(theirs.path), call_run=call_run)
    yield Client(ScriptedTokens(), responses=state), theirs
    await state.close()
    await theirs.close()


@pytest.mark.parametrize("query", ["stream=true", "cancel"])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_run_of_another_process_that_has_just_ended_is_read_from_the_store(
    query: str, is_stored: bool, tmp_path: Path
) -> None:
    async def call_run(_: str, response_id: str, number: int | None) -> AsyncGenerator[bytes, None]:
        status = "completed" if query == "stream=true" else "cancelled"
        assert number == (-1 if query == "stream=true" else None)
        body = b'{"status":"%b"}' % status.encode()
        last = response(response_id, status=status, body=body, events=EVENTS, is_background=True)
        if is_stored:
            await theirs.save(last, [])
        for nothing in list[bytes]():
            yield nothing

    async with beside(call_run, tmp_path) as (client, theirs):
        if query == "cancel":
            reply = await client.post("/v1/responses/theirs/cancel", {})
            assert reply.body == b'{"status":"cancelled"}' or not is_stored
        else:
            reply = await client.get(f"/v1/responses/theirs?{query}")
            assert reply.body == EVENTS or not is_stored
        assert reply.status == (200 if is_stored else 503)


async def test_a_stream_whose_process_is_lost_ends_with_a_numbered_error(tmp_path: Path) -> None:
    async def call_run(_: str, response_id: str, number: int | None) -> AsyncGenerator[bytes, None]:
        yield b""
        yield EVENTS * 2
        raise NotReady("Gone.")

    async with beside(call_run, tmp_path) as (client, _):
        reply = await client.get("/v1/responses/theirs?stream=true&starting_after=3")
        *_, last = reply.events
        assert (last["type"], last["sequence_number"], last["code"]) == ("error", 6, "not_ready")
