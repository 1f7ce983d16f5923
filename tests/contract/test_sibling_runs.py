"""Background runs that another frontend process follows, stops or deletes, over real Unix sockets."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from baton.errors import InvalidRequest, NotReady
from frontend.harmony.parse import Begin, Delta, End, Text
from frontend.metrics import Metrics
from frontend.processes.siblings import Siblings
from frontend.responses import store
from frontend.responses.runs import ResponseState, Run
from frontend.responses.store import ResponseStore, StoredResponse
from frontend.snapshot import Part
from frontend.turn.thoughts import Thoughts
from tests.generators import none_abandoned
from tests.scripted_frontend import Client, ScriptedTokens
from tests.stored_responses import response
from tests.waiting import PATIENCE_S, until

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
NO_PART = dict[int, Part]().__getitem__


@asynccontextmanager
async def processes(run: Run, runs: ResponseState) -> AsyncIterator[tuple[ResponseState, StoredResponse]]:
    """A frontend, and the stored state of a run of another frontend, which has these runs."""
    ours, theirs = Siblings(), Siblings()
    none = Thoughts(), Metrics()
    async with ours.answering(*none, ResponseState(), NO_PART), theirs.answering(*none, runs, NO_PART):
        state = ResponseState(call_run=ours.call_run)
        yield state, at(theirs, run)
        await state.close()


def at(process: Siblings, run: Run) -> StoredResponse:
    return response(run.answer.response.id, status="in_progress", runs_at=process.address)


@asynccontextmanager
async def running(store: ResponseStore | None = None, **fields: bool) -> AsyncIterator[tuple[Client, Run]]:
    """A background response that waits for `go_on`."""
    state = ResponseState(store or ResponseStore())
    client = Client(ScriptedTokens(ANSWER, pause_at=0), responses=state)
    pending = asyncio.create_task(client.respond(background=True, **fields))
    await client.tokens.paused.wait()
    (run,) = state._runs.values()  # noqa: SLF001  its id is not known yet
    yield client, run
    client.tokens.go_on.set()
    await pending
    await state.close()


async def read(state: ResponseState, found: StoredResponse, sequence_number: int | None) -> bytes:
    return b"".join([data async for data in state.call(found, sequence_number)])


async def publish(run: Run, num_bytes: int) -> None:
    """As if the model had written a message of this length."""
    message: list[Delta] = [Begin("text"), Text("x" * num_bytes, 0, 1), End()]
    await run._publish(run.answer.write(message))  # noqa: SLF001  much at once


async def test_stopping_a_run_from_another_process_waits_until_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "WAIT_S", PATIENCE_S)
    can_save = threading.Event()
    can_save.set()

    def clock() -> float:
        assert can_save.wait(PATIENCE_S)
        return 0.0

    async with (
        running(ResponseStore(clock=clock)) as (client, run),
        processes(run, client.responses) as (ours, theirs),
    ):
        made = run.answer.response
        can_save.clear()
        stopping = asyncio.create_task(read(ours, theirs, None))
        await until(lambda: made.status == "cancelled")
        for _ in range(20):
            await asyncio.sleep(0)  # turns for what must not happen
        assert not stopping.done()
        can_save.set()
        await stopping
        stored = await client.responses.store.load(made.id)
        assert stored is not None
        assert stored.status == "cancelled"
        assert await read(ours, theirs, None) == b""  # it has ended


async def test_a_follower_that_reads_slowly_gets_all_events(tmp_path: Path) -> None:
    async with (
        running(stream=True) as (client, run),
        processes(run, client.responses) as (ours, theirs),
        aclosing(ours.call(theirs, 0)) as followed,
    ):
        assert await anext(followed) == b""
        await until(lambda: len(run.followers) == 2)
        num_messages = 10
        for _ in range(num_messages):  # 10 MiB, as each is sent four times
            await publish(run, 1 << 18)
            for _ in range(10):
                await asyncio.sleep(0)  # turns in which they could be sent
        late = asyncio.create_task(read(ours, theirs, 0))
        await until(lambda: len(run.followers) == 3)
        client.tokens.go_on.set()
        events = b"".join([data async for data in followed])
        assert events == await late
        last = int(events.rpartition(b'"sequence_number":')[2].partition(b"}")[0])
        assert events.count(b"\n\n") == last
        assert events.count(b"x") > 4 * num_messages << 18  # in deltas, and in what ends them


async def test_a_follower_elsewhere_that_has_left_is_forgotten(tmp_path: Path) -> None:
    async with running(stream=True) as (client, run), processes(run, client.responses) as (ours, theirs):
        with none_abandoned():
            async with aclosing(ours.call(theirs, -1)) as followed:
                assert [await anext(followed) != b"" for _ in range(2)] == [False, True]
                assert len(run.followers) == 2
            async with asyncio.timeout(PATIENCE_S):
                while len(run.followers) > 1:
                    await publish(run, 10)  # that it has left is noticed only then
                    await asyncio.sleep(0.001)  # other tasks have their turn


async def test_an_event_between_the_begin_of_a_follower_and_its_first_read_comes_once() -> None:
    async with running(stream=True) as (client, run):
        followed = client.responses.answer(run.answer.response.id, -1)
        assert await anext(followed) == b""
        await publish(run, 10)
        client.tokens.go_on.set()
        events = b"".join([data async for data in followed])
        numbers = [int(number) for number in re.findall(rb'"sequence_number":(\d+)', events)]
        assert numbers == [*range(len(numbers))]


async def test_a_run_without_a_stream_cannot_be_followed_elsewhere_either(tmp_path: Path) -> None:
    async with running() as (client, run), processes(run, client.responses) as (ours, theirs):
        with pytest.raises(InvalidRequest, match="not stored"):
            await read(ours, theirs, -1)


async def test_a_follower_gets_an_error_when_the_process_that_runs_it_is_lost(tmp_path: Path) -> None:
    theirs = Siblings()
    async with running(stream=True) as (client, run):
        ours = Siblings()
        shared = Thoughts(), Metrics(), client.responses, NO_PART
        async with AsyncExitStack() as other, ours.answering(*shared):
            await other.enter_async_context(theirs.answering(*shared))
            state, stored = ResponseState(call_run=ours.call_run), at(theirs, run)
            async with aclosing(state.call(stored, -1)) as followed:
                assert [await anext(followed) != b"" for _ in range(2)] == [False, True]
                await other.aclose()
                with pytest.raises(NotReady):
                    await anext(followed)
            for gone in (stored, msgspec.structs.replace(stored, runs_at="")):
                with pytest.raises(NotReady):
                    await read(state, gone, None)
            await state.close()
