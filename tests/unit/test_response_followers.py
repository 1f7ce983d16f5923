"""Background runs and those who follow them: what each gets, and that one who leaves costs nothing more."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, NotReady
from baton.messages import GenerateRequest, TokenChunk
from frontend.harmony.conversation import TextDelta
from frontend.http.sse import MAX_UNSENT_BYTES
from frontend.responses.output import MAX_KEPT_STREAM_BYTES
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore, StoredResponse
from tests.scripted_frontend import Client, ScriptedTokens, ended, frontend
from tests.stored_responses import response
from tests.waiting import until

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
LARGE = TextDelta("x" * MAX_UNSENT_BYTES, 0, 1)


async def test_nothing_is_kept_for_a_follower_that_has_left() -> None:
    async with frontend(ANSWER, script={"pause_at": 0}) as client:
        made = asyncio.create_task(client.respond(background=True, stream=True))
        await client.tokens.paused.wait()
        [(response_id, run)] = client.responses._runs.items()  # noqa: SLF001  its id is not known yet
        url = f"/v1/responses/{response_id}?stream=true"
        following = asyncio.create_task(client.get(url))
        await until(lambda: len(run._followers) == 2)  # noqa: SLF001  nothing else shows it
        client.leave.set()
        await asyncio.gather(made, following)
        assert not run._followers  # noqa: SLF001  nothing else shows it
        with run.follow(-1) as left:
            assert (await left.outbox.take()).startswith(b"event: response.created")
        with run.follow(0) as stays:
            await run._publish(run.answer.write([LARGE]))  # noqa: SLF001  a large part of an answer
            assert (stays.outbox.full, left.outbox.full) == (True, False)
        run.answer.write([TextDelta("x" * MAX_KEPT_STREAM_BYTES, 0, 1)])
        with pytest.raises(InvalidRequest, match="not stored") as error, run.follow(-1):
            pass
        assert error.value.param == "stream"
        assert not run._followers  # noqa: SLF001  nothing else shows it
        client.tokens.go_on.set()


class BrokenStore(ResponseStore):
    """Fails to save what has ended, as no store should."""

    async def save(self, response: StoredResponse, item_ids: object) -> None:
        if response.status != "in_progress":
            raise RuntimeError("broken")


async def test_a_run_whose_end_cannot_be_saved_still_ends_for_its_followers() -> None:
    client = Client(ScriptedTokens(ANSWER), responses=ResponseState(BrokenStore()))
    reply = await client.respond(background=True, stream=True)
    assert reply.events[-1]["type"] != "response.completed"
    assert client.metric("baton_running_requests", route="background") == 0
    assert not client.responses._runs  # noqa: SLF001  no route shows how many there are
    await client.responses.close()


async def test_the_text_so_far_is_shown_while_a_run_goes_on() -> None:
    async with frontend(ANSWER, script={"pause_at": 9}) as client:
        made = (await client.respond(background=True)).json
        await client.tokens.paused.wait()
        (message,) = (await client.get(f"/v1/responses/{made['id']}")).json["output"]
        (part,) = message["content"]
        assert message["status"] == "in_progress"
        assert part["text"] == "He"
        client.tokens.go_on.set()
        (message,) = (await ended(client, made["id"]))["output"]
        assert (message["status"], message["content"][0]["text"]) == ("completed", "Hello")


class NotingTokens(ScriptedTokens):
    """Notes who asks."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.callers: list[str] = []

    def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None]
    ) -> AsyncGenerator[TokenChunk, None]:
        self.callers.append(caller)
        return super().generate(request, caller, on_taken)


async def test_a_run_waits_in_the_turn_of_the_user_who_asked_for_it() -> None:
    tokens = NotingTokens(ANSWER)
    client = Client(tokens)
    for background in (False, True):
        for user in ("ann", "bob"):
            made = (await client.respond(user=user, background=background)).json
            await ended(client, made["id"])
    first, second, *background_callers = tokens.callers
    assert first != second
    assert background_callers == [first, second]
    await client.responses.close()


EVENTS = b'event: a\ndata: {"sequence_number":4}\n\nevent: b\ndata: {"sequence_number":5}\n\n'


class Elsewhere:
    """Another process, which has the run, says two events of it, and ends."""

    def __init__(self, store: ResponseStore, error: NotReady | None) -> None:
        self._store = store
        self._error = error

    async def call_run(
        self, address: str, response_id: str, sequence_number: int | None
    ) -> AsyncGenerator[bytes, None]:
        assert (address, response_id, sequence_number) == ("unix:@theirs", "theirs", 3)
        yield b""
        yield EVENTS
        await self._store.save(response("theirs", events=b"data: {}\n\n" * 4 + EVENTS), [])
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, NotReady("It has ended.")])
async def test_a_run_of_another_process_is_streamed_from_there(
    error: NotReady | None, tmp_path: Path
) -> None:
    path = str(tmp_path / "responses.sqlite3")
    theirs, ours = ResponseStore(path, address="unix:@theirs"), ResponseStore(path)
    await theirs.save(response("theirs", status="in_progress", is_background=True), [])
    client = Client(
        ScriptedTokens(), responses=ResponseState(ours, call_run=Elsewhere(theirs, error).call_run)
    )
    reply = await client.get("/v1/responses/theirs?stream=true&starting_after=3")
    assert reply.status == 200
    assert reply.body.startswith(EVENTS)
    told = [(event["sequence_number"], event.get("code")) for event in reply.events]
    assert told == [(4, None), (5, None), *([(6, "not_ready")] if error else [])]
    await client.responses.close()
    await theirs.close()


@pytest.mark.parametrize("query", ["stream=true", "cancel"])
async def test_a_run_of_another_process_that_has_just_ended_is_read_from_the_store(
    query: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "responses.sqlite3")
    theirs, ours = ResponseStore(path, address="unix:@theirs"), ResponseStore(path)
    await theirs.save(response("theirs", status="in_progress", is_background=True), [])

    async def call_run(
        address: str, response_id: str, sequence_number: int | None
    ) -> AsyncGenerator[bytes, None]:
        status = "cancelled" if sequence_number is None else "completed"
        body = b'{"status":"%b"}' % status.encode()
        await theirs.save(response("theirs", status=status, body=body, events=EVENTS, is_background=True), [])
        for nothing in list[bytes]():
            yield nothing

    client = Client(ScriptedTokens(), responses=ResponseState(ours, call_run=call_run))
    if query == "cancel":
        reply = await client.post("/v1/responses/theirs/cancel", {})
        assert reply.json == {"status": "cancelled"}
    else:
        assert (await client.get(f"/v1/responses/theirs?{query}")).body == EVENTS
    await client.responses.close()
    await theirs.close()
