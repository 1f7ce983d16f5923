"""Frontends that share a response store: who makes a response, and what is told when that one has died."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from frontend.responses.store import DIED, Owner, ResponseStore
from tests.stored_responses import another_frontend, response, rows


def num_locks(folder: Path) -> int:
    return len(list(folder.glob("*.lock")))


async def status_of(store: ResponseStore, name: str) -> str:
    found = await store.load(name)
    assert found is not None
    return found.status


def test_what_a_dead_frontend_was_making_has_failed_and_a_living_ones_has_not(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"

    async def status() -> tuple[str, object]:
        store = ResponseStore(str(path))
        await store.open()
        found = await store.load("theirs")
        await store.close()
        assert found is not None
        return found.status, json.loads(found.body).get("error")

    with another_frontend(path):
        assert asyncio.run(status()) == ("in_progress", None)
    assert asyncio.run(status()) == ("failed", {"code": "server_error", "message": DIED})
    assert list(tmp_path.glob("*.lock")) == []


async def test_a_frontend_that_dies_while_another_looks_on_has_failed_too(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    with another_frontend(path):
        await store.open()
        assert await status_of(store, "theirs") == "in_progress"
    assert await status_of(store, "theirs") == "failed"
    await store.close()


@pytest.mark.parametrize("is_lock_there", [True, False])
async def test_opening_reports_what_the_dead_left_before_anybody_asks(
    tmp_path: Path, is_lock_there: bool
) -> None:
    path = tmp_path / "responses.sqlite3"
    with another_frontend(path):
        pass
    if not is_lock_there:
        for lock in tmp_path.glob("*.lock"):
            lock.unlink()
    store = ResponseStore(str(path))
    await store.open()
    assert rows(path, "SELECT id, status FROM responses") == [("theirs", "failed")]
    await store.close()


async def test_a_response_of_its_own_that_nobody_makes_any_more_has_failed(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "responses.sqlite3"))
    await store.open()
    await store.save(response("b"), [])
    assert num_locks(tmp_path) == 0  # only what runs needs one
    await store.save(response("a", status="in_progress", body=b"{}"), [])
    assert num_locks(tmp_path) == 1
    assert await status_of(store, "a") == "failed"
    await store.close()
    assert num_locks(tmp_path) == 0


@pytest.mark.parametrize("is_written", [True, False])
async def test_what_another_frontend_has_deleted_is_not_stored_again(
    is_written: bool, tmp_path: Path
) -> None:
    path = tmp_path / "responses.sqlite3"
    runs_it, other = ResponseStore(str(path)), ResponseStore(str(path))
    await asyncio.gather(runs_it.open(), other.open())
    running = response("a", status="in_progress", is_background=True)
    if is_written:
        await runs_it.save(running, ["msg_1"])
        assert await other.delete("a")
        await runs_it.save(response("a", is_background=True), ["msg_1"])
    else:  # both versions wait for the disk
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            await runs_it.save(running, ["msg_1"])
            assert runs_it.is_failing
            await runs_it.save(response("a", is_background=True), ["msg_1"])
    await runs_it.close()
    assert (await other.load("a") is None) is is_written
    await other.close()


async def test_a_locked_file_still_tells_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    await store.open()
    await store.save(response("a", status="in_progress", body=b"{}"), [])
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert await status_of(store, "a") == "in_progress"
    assert await status_of(store, "a") == "failed"
    await store.close()


def test_owners_of_one_process_are_told_apart(tmp_path: Path) -> None:
    first, second = (Owner(str(tmp_path / "responses")) for _ in range(2))
    first.claim()
    first.claim()
    assert second.lives_elsewhere(first.name)
    assert not first.lives_elsewhere(first.name)
    first.close()
    assert not second.lives_elsewhere(first.name)
    second.claim()
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    second.close()  # what it would remove is gone


def test_the_owner_of_a_store_in_memory_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    owner = Owner(None)
    owner.claim()
    assert not owner.lives_elsewhere("other")
    assert list(tmp_path.iterdir()) == []
    owner.close()
