"""A frontend's process from its start to its end: what it waits for, what its flags do, how it drains."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import WorkerLost
from baton.messages import GenerateRequest
from frontend import __main__ as frontend_main
from frontend.flags import FrontendSettings
from frontend.responses.store import ResponseStore
from tests.scripted_workers import answer
from tests.serving_frontend import MODEL, Held, Workers, process, serving
from tests.waiting import PATIENCE_S, until


def missing_at_first(what: str) -> Workers:
    """A worker, and a registry or a broker that is not there yet."""
    workers = Workers(d1=answer)
    workers.broker_is_away = what == "broker"
    if what == "registry":
        workers.may_tell.clear()
    return workers


@pytest.mark.parametrize("missing", ["registry", "broker"])
async def test_no_connection_is_accepted_before_requests_can_be_served(missing: str) -> None:
    workers = missing_at_first(missing)
    async with process(workers) as frontend:
        asking = asyncio.create_task(frontend.get(f"/v1/models/{MODEL}"))  # waits in the socket's queue
        assert not (await asyncio.wait([asking], timeout=0.2))[0]
        assert not frontend.is_listening.is_set()
        workers.may_tell.set()
        workers.broker_is_away = False
        assert (await asking).status_code == 200
        assert frontend.is_listening.is_set()
        assert await frontend.end() == 0
        assert workers.num_closed == 2  # the registry and the plane


async def test_a_registry_that_is_silent_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_main, "SYNC_TIMEOUT_S", 0.01)
    async with process(missing_at_first("registry")) as frontend:
        assert (await frontend.get("/health")).status_code == 503


async def test_a_frontend_that_takes_over_waits_for_the_registry_as_the_other_one_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontend_main, "SYNC_TIMEOUT_S", 0.01)
    workers = missing_at_first("registry")
    async with process(workers, take_over=True) as frontend:
        asking = asyncio.create_task(frontend.get("/health"))
        assert not (await asyncio.wait([asking], timeout=0.2))[0]
        workers.may_tell.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize("missing", ["registry", "broker"])
async def test_a_frontend_that_waits_at_its_start_can_be_ended(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_main, "SYNC_TIMEOUT_S", PATIENCE_S)
    async with process(missing_at_first(missing)) as frontend:
        assert not (await asyncio.wait([frontend.serving], timeout=0.2))[0]
        assert await frontend.end() == 0


async def test_a_frontend_that_can_no_longer_follow_its_workers_ends() -> None:
    workers = Workers(d1=answer)
    async with serving(workers) as frontend:
        workers.broken.set()
        with pytest.raises(RuntimeError, match="the registry broke"):
            await asyncio.wait_for(frontend.serving, PATIENCE_S)


async def test_a_drain_ends_when_all_answers_have_and_stores_them(tmp_path: Path) -> None:
    held, path = Held(), str(tmp_path / "responses.sqlite3")
    workers = Workers(d1=held)
    async with serving(workers, response_store=path, drain_timeout_s=PATIENCE_S) as frontend:
        asking = asyncio.create_task(frontend.complete())
        made = (await frontend.respond(background=True)).json()
        await until(lambda: len(workers.open) == 2)
        await held.began.wait()
        frontend.shutdown.set()
        await until(lambda: frontend.listener.fileno() < 0)
        assert not frontend.serving.done()
        held.goes_on.set()
        assert (await asking).json()["usage"]["completion_tokens"] == 4
        assert await frontend.end() == 0
    assert (await stored(path, made["id"]))["status"] == "incomplete"  # of length


async def test_a_drain_ends_when_its_time_is_over(tmp_path: Path) -> None:
    held, path = Held(), str(tmp_path / "responses.sqlite3")
    workers = Workers(d1=held)
    async with serving(workers, response_store=path, drain_timeout_s=0.0) as frontend:
        asking = asyncio.create_task(frontend.complete())
        made = (await frontend.respond(background=True)).json()
        await until(lambda: len(workers.open) == 2)
        assert await frontend.end() == 0
        assert (await asking).status_code == 503
        assert workers.open == []
    assert (await stored(path, made["id"]))["error"]["message"].startswith("The server shut down")


async def test_workers_are_followed_during_a_drain() -> None:
    held = Held()

    async def lost(asked: GenerateRequest) -> Any:
        async for reply in held(asked):
            yield reply
            await held.goes_on.wait()
            raise WorkerLost("gone")

    workers = Workers(d1=lost)
    async with serving(workers, drain_timeout_s=PATIENCE_S, wait_for_worker_s=PATIENCE_S) as frontend:
        asking = asyncio.create_task(frontend.complete())
        await until(lambda: workers.open)
        frontend.shutdown.set()
        await until(lambda: frontend.listener.fileno() < 0)
        workers.join("d2", answer)
        held.goes_on.set()
        assert (await asking).json()["usage"]["completion_tokens"] == 4
        assert workers.called[-1] == "d2"


async def test_a_store_that_cannot_be_opened_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with process(Workers(), response_store=str(tmp_path)) as frontend:
        assert await frontend.serving == 2
        assert capsys.readouterr().err.startswith("error: --response-store: ")


async def test_responses_are_in_memory_if_the_default_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    default = FrontendSettings.response_store
    async with serving(Workers(d1=answer), response_store=default) as frontend:
        await frontend.is_listening.wait()
        made = (await frontend.respond()).json()
        assert (await frontend.get(f"/v1/responses/{made['id']}")).json()["id"] == made["id"]


async def stored(path: str, response_id: str) -> Any:
    """The response in the file, once no frontend has it open."""
    store = ResponseStore(path)
    await store.open()
    found = await store.load(response_id)
    await store.close()
    assert found is not None
    return json.loads(found.body)
