"""Background runs that another process of the frontend follows or stops, over real Unix sockets."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import InvalidRequest
from frontend.harmony.deltas import TextDelta
from frontend.http.limits import Quotas
from frontend.metrics import Metrics
from frontend.processes.siblings import Shared, Siblings
from frontend.responses import unwritten
from frontend.responses.runs import ResponseState, Run, Runs
from frontend.responses.store import ResponseStore
from frontend.turn.thoughts import Thoughts
from tests.generators import none_abandoned
from tests.scripted_frontend import Client, ScriptedTokens
from tests.waiting import PATIENCE_S, until

ANSWER = "<|channel|>final<|message|>Hello<|return|>"
NUM_PROCESSES = 3


@asynccontextmanager
async def processes(folder: Path, runs: Runs) -> AsyncIterator[list[Siblings]]:
    """Three processes, of which the last one has these runs."""
    made = [Siblings(folder, index, NUM_PROCESSES) for index in range(NUM_PROCESSES)]
    shared = [Shared(Thoughts(), Metrics(), each, Quotas()) for each in (Runs(), Runs(), runs)]
    async with made[0].answering(shared[0]), made[1].answering(shared[1]), made[2].answering(shared[2]):
        yield made


@asynccontextmanager
async def running(store: ResponseStore | None = None, **fields: bool) -> AsyncIterator[tuple[Client, Run]]:
    """A background response that waits for `go_on`."""
    state = ResponseState(store or ResponseStore())
    client = Client(ScriptedTokens(ANSWER, pause_at=0), responses=state)
    asking = asyncio.create_task(client.respond(background=True, **fields))
    await client.tokens.paused.wait()
    (run,) = state.runs._runs.values()  # noqa: SLF001  its id is not known yet
    yield client, run
    client.tokens.go_on.set()
    await asking
    await state.close()


def say(run: Run, num_bytes: int) -> None:
    """As if the model had said so much."""
    run._publish(run.answer.write(0, [TextDelta("x" * num_bytes, 0, 1)]))  # noqa: SLF001  much at once


def test_a_run_is_stopped_by_whichever_process_is_asked_once_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwritten, "WAIT_S", PATIENCE_S)
    can_save = threading.Event()
    can_save.set()

    def clock() -> float:
        assert can_save.wait(PATIENCE_S)
        return 0.0

    async def scenario() -> None:
        async with (
            running(ResponseStore(clock=clock)) as (client, run),
            processes(tmp_path, client.responses.runs) as (first, *_),
        ):
            response = run.answer.response
            can_save.clear()
            stopping = asyncio.create_task(first.stop(response.id))
            await until(lambda: response.status == "cancelled")
            for _ in range(20):
                await asyncio.sleep(0)  # turns for what must not happen
            assert not stopping.done()
            can_save.set()
            assert await stopping
            stored = await client.responses.store.load(response.id)
            assert stored is not None
            assert stored.status == "cancelled"
            assert not await first.stop(response.id)

    asyncio.run(scenario())


def test_a_follower_that_reads_slowly_holds_the_events_back_and_gets_them_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running(stream=True) as (client, run),
            processes(tmp_path, client.responses.runs) as (first, *_),
            first.follow(run.answer.response.id, 0) as followed,
        ):
            assert followed is not None
            await until(lambda: len(run._outboxes) == 2)  # noqa: SLF001  nothing else shows it
            num_said = 0
            while not run._outboxes[1].full:  # noqa: SLF001  nothing else shows it
                assert num_said < 40  # 10 MiB
                num_said += 1
                say(run, 1 << 18)
                for _ in range(10):
                    await asyncio.sleep(0)  # turns in which they could be sent
            client.tokens.go_on.set()
            told = b""
            while data := await followed.outbox.take():
                told += data
            assert told.count(b"\n\n") == run.answer.num_events - 1
            assert told.count(b"x") > 4 * num_said << 18  # in deltas, and in what ends them
            assert followed.num_events == run.answer.num_events

    asyncio.run(scenario())


def test_a_follower_elsewhere_that_has_left_is_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running(stream=True) as (client, run),
            processes(tmp_path, client.responses.runs) as (first, *_),
        ):
            with none_abandoned():
                async with first.follow(run.answer.response.id, -1) as followed:
                    assert followed is not None
                    assert await followed.outbox.take()
                    assert len(run._outboxes) == 2  # noqa: SLF001  nothing else shows it

                def is_alone() -> bool:
                    say(run, 10)  # that it has left is noticed only then
                    return len(run._outboxes) == 1  # noqa: SLF001  nothing else shows it

                await until(is_alone)

    asyncio.run(scenario())


def test_a_run_without_a_stream_cannot_be_followed_elsewhere_either(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running() as (client, run), processes(tmp_path, client.responses.runs) as (first, *_):
            with pytest.raises(InvalidRequest, match="not stored") as error:
                async with first.follow(run.answer.response.id, -1):
                    pass
            assert error.value.param == "stream"
            async with first.follow("resp_none", -1) as nothing:
                assert nothing is None

    asyncio.run(scenario())


def test_questions_leave_no_connection_no_task_and_no_complaint_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with processes(tmp_path, Runs()) as (first, second, _):
            gc.collect()
            num_open = len(os.listdir("/proc/self/fd"))
            with none_abandoned():
                for _ in range(5):
                    assert len(await first.metrics()) == NUM_PROCESSES - 1
            assert not await first.stop("resp_none")
            await until(lambda: not second._tasks)  # noqa: SLF001  nothing else shows it
            await until(lambda: len(os.listdir("/proc/self/fd")) <= num_open)
        gc.collect()  # an unclosed transport would warn
        assert not [record for record in caplog.records if record.name == "asyncio"]

    asyncio.run(scenario())
