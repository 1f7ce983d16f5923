"""The response store: what it keeps, how long, who may read it, and how it meets a disk that fails."""

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from frontend.responses import store as store_module
from frontend.responses.store import (
    DIED,
    MAX_CHAIN_BYTES,
    ResponseStore,
    StoredResponse,
    StoreFailure,
    connect,
)
from tests.stored_responses import another_frontend, response, rows
from tests.waiting import PATIENCE_S, until


async def loaded(store: ResponseStore, name: str) -> StoredResponse:
    found = await store.load(name)
    assert found is not None
    return found


async def kept(store: ResponseStore, names: str) -> str:
    return "".join([name for name in names if await store.load(name) is not None])


async def chained(store: ResponseStore, name: str) -> str:
    return "".join(each.id for each in await store.chain(name) or ())


async def with_item(store: ResponseStore, item_id: str) -> str:
    found = await store.with_item(item_id)
    return "" if found is None else found.id


@contextmanager
def writing(path: Path, how: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """Another process writes, until it ends or commits."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield other


async def test_a_response_is_saved_loaded_updated_and_deleted() -> None:
    store = ResponseStore()
    first = response("a", status="in_progress", is_background=True)
    await store.save(first, ["msg_1"])
    events = b"event: x\ndata: {}\n\n" * 10_000
    last = response("a", body=b'{"output":[1]}', events=events, is_background=True)
    await store.save(last, ["msg_1", "msg_2"])
    assert await store.load("a") == last
    # Reading a long stream would hold up the event loop.
    assert await store.with_item("msg_2") == msgspec.structs.replace(last, events=None)
    await store.delete("a")
    assert [await store.load("a"), await store.with_item("msg_1")] == [None, None]
    await store.close()


async def test_a_chain_is_read_whole_up_to_a_number_of_responses_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ResponseStore()
    third = b"x" * (MAX_CHAIN_BYTES // 3 - len(response("a").body))
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "c"), ("e", "f"), ("f", "e")):
        await store.save(response(name, previous_id=previous, items=third), [])
    assert [await chained(store, name) for name in "cde"] == ["abc", "", ""]  # the last one has no end
    monkeypatch.setattr(store_module, "MAX_CHAIN", 2)
    assert [await chained(store, name) for name in "bc"] == ["ab", ""]
    await store.delete("a")
    assert await chained(store, "b") == ""
    await store.close()


async def test_the_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "responses.sqlite3"
    umask = os.umask(0)
    try:
        store = ResponseStore(str(path))
        await store.open()
        await store.save(response("a", status="in_progress"), [])
        databases = list(path.parent.glob("*.sqlite3*"))
        await store.close()
    finally:
        os.umask(umask)
    assert {each.suffix for each in databases} >= {".sqlite3", ".sqlite3-wal"}
    assert path.parent.stat().st_mode & 0o077 == path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("limits", "kept_names"),
    [({"MAX_RESPONSES": 3}, "ade"), ({"MAX_AGE_S": 2}, "ade"), ({"MAX_BYTES": 1000}, "e")],
)
async def test_the_responses_used_last_are_kept(
    limits: dict[str, int], kept_names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    store = ResponseStore(clock=lambda: now_s[0])
    for name, previous in {"a": None, "b": None, "c": None, "d": "a"}.items():
        now_s[0] += 1
        await store.save(response(name, previous_id=previous), [])
    await store.chain("d")  # uses a, too
    now_s[0] += 2
    for name, limit in {"PRUNE_EVERY": 1, **limits}.items():
        monkeypatch.setattr(store_module, name, limit)
    await store.save(response("e", items=b"x" * 980), [])
    assert await kept(store, "abcde") == kept_names
    await store.close()


async def test_a_deleted_response_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    await store.save(response("a"), ["msg_1", "msg_2"])
    assert rows(path, "SELECT count(*) FROM item_ids") == [(2,)]
    await store.delete("a")
    assert rows(path, "SELECT count(*) FROM item_ids") == [(0,)]
    await store.close()


async def test_a_file_that_cannot_be_used_is_a_named_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, newer, locked = (tmp_path / name for name in ("text", "newer", "locked"))
    text.write_text("This is no database, however long one looks at it. " * 100)
    with closing(sqlite3.connect(newer)) as db:
        db.execute("PRAGMA user_version = 99")
    monkeypatch.setattr(store_module, "_OPEN_BUSY_S", 0.01)
    harms = {tmp_path: "directory", text: "not a database", newer: "version 99", locked: "lock"}
    with writing(locked, "EXCLUSIVE"):
        for path, why in harms.items():
            with pytest.raises(StoreFailure, match=why):
                await ResponseStore(str(path)).open()


def test_processes_that_create_the_file_together_all_open_it(tmp_path: Path) -> None:
    # About one of 40 was refused; threads are as good, since SQLite locks connections.
    together = threading.Barrier(4)

    def opened(path: Path) -> None:
        together.wait(PATIENCE_S)
        connect(str(path)).close()

    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            path = tmp_path / f"{number}.sqlite3"
            assert list(pool.map(opened, [path] * 4)) == [None] * 4


async def test_unwritten_responses_are_found_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    await store.save(response("a"), ["msg_1"])
    with writing(path) as other:
        await store.save(response("b", previous_id="a"), ["msg_1"])
        assert store.is_failing
        await store.save(response("c"), [])
        assert await kept(store, "abc") == "abc"
        assert [await with_item(store, "msg_1"), await chained(store, "b")] == ["b", "ab"]
        with pytest.raises(StoreFailure, match="locked"):
            await store.delete("a")
        other.execute("COMMIT")
    await store.delete("c")
    assert await kept(store, "c") == ""
    await until(lambda: not store.is_failing)
    assert rows(path, "SELECT id FROM responses ORDER BY id") == [("a",), ("b",)]
    await store.close()
    assert caplog.text.count("response_store=failing") == 1


async def test_while_the_disk_hangs_a_response_is_its_keys_only_and_others_are_a_named_failure() -> None:
    is_writing, goes_on = threading.Event(), threading.Event()

    def clock() -> float:
        is_writing.set()
        assert goes_on.wait(PATIENCE_S)
        return 0.0

    store = ResponseStore(clock=clock)
    made = response("a", key_name="alice")
    saving = asyncio.create_task(store.save(made, ["msg_1"]))
    await until(is_writing.is_set)
    assert await store.load("a", "bob") is None
    assert await store.load("a", "alice") == made
    assert await store.with_item("msg_1", "alice") == made
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(store_module, "_ANSWER_S", 0.05)
        with pytest.raises(StoreFailure, match="does not answer"):
            await store.load("b")
        assert not store.is_failing  # writing may take longer than reading
        impatient.setattr(store_module, "_ANSWER_S", 1.0)
        finding = asyncio.create_task(store.with_item("msg_1", "bob"))
        await asyncio.sleep(0)  # the read begins
        time.sleep(1.0)  # noqa: ASYNC251  the whole process is frozen
        goes_on.set()
        assert await finding is None
    await saving
    await store.close()


async def test_the_newest_unwritten_responses_are_kept_up_to_a_number_of_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UNWRITTEN_BYTES", 3000)
    monkeypatch.setattr(store_module, "_FLUSH_S", 0.01)
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    await store.open()
    with writing(path):
        for name in "abacd":
            await store.save(response(name, body=b"x" * 998), ["msg_1"])
        assert [await kept(store, "abcd"), await with_item(store, "msg_1")] == ["acd", "d"]
        await store.save(response("e", body=b"x" * 2998), [])
        assert await kept(store, "abcde") == "e"
        await store.close()
    assert "response not stored response_id=b" in caplog.text
    assert "responses lost num=1" in caplog.text


async def test_runs_of_a_dead_frontend_have_failed_and_so_has_one_that_nobody_makes(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    with another_frontend(path):
        found = await loaded(store, "theirs")
        assert (found.status, found.runs_at) == ("in_progress", "unix:@theirs")
    error, found = {"code": "server_error", "message": DIED}, await loaded(store, "theirs")
    assert (json.loads(found.body)["error"], found.runs_at) == (error, "")
    await store.save(response("b"), [])
    assert not list(tmp_path.glob("*.lock"))  # only what runs needs one
    await store.save(response("a", status="in_progress", body=b"{}"), [])
    assert (await loaded(store, "a")).status == "failed"
    other = ResponseStore(str(path))
    assert (await loaded(other, "a")).status == "in_progress"
    await store.close()
    assert not list(tmp_path.glob("*.lock"))
    assert (await loaded(other, "a")).status == "failed"
    with another_frontend(path):
        await other.open()
        assert len(list(tmp_path.glob("*.lock"))) == 1
    await other.open()
    assert not list(tmp_path.glob("*.lock"))
    await other.save(response("c", status="in_progress", body=b"{}"), [])
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    await other.close()  # its lock file is gone


async def test_a_file_of_release_0_1_opens_and_that_release_can_still_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    store = ResponseStore(str(path))
    await store.save(response("a"), [])
    await store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE responses DROP COLUMN key_name")
        db.commit()
    for name in "bc":
        store = ResponseStore(str(path))
        await store.open()
        await store.save(response(name, key_name="alice"), [])
        assert await kept(store, "abc") == "a"
        await store.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "INSERT INTO responses (id, status, is_background, owner, used_s, num_bytes, body, items) "
            "VALUES ('d', 'completed', 0, '', 0, 0, '', '')"
        )
        db.commit()
    keys = [("a", ""), ("b", "alice"), ("c", "alice"), ("d", "")]
    assert rows(path, "SELECT id, key_name FROM responses ORDER BY id") == keys
