"""The response store by itself: what it keeps, for how long, and what it makes of a dead frontend's runs."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from frontend.response_store import (
    DIED,
    MAX_CHAIN,
    MAX_CHAIN_BYTES,
    ResponseStore,
    Retention,
    StoredResponse,
    StoreFailure,
)

# Another process that claims a running response, says so, and lives until it is killed.
OTHER_FRONTEND = """
import asyncio, sys
from frontend.response_store import ResponseStore, StoredResponse
async def main():
    store = ResponseStore(sys.argv[1])
    body = b'{"status": "in_progress"}'
    await store.save(StoredResponse(id="theirs", status="in_progress", body=body, items=b"[]"), [])
    print("saved", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def response(response_id: str, **fields: object) -> StoredResponse:
    given = {"status": "completed", "body": b'{"output":[]}', "items": b"[]", **fields}
    return StoredResponse(id=response_id, **given)  # type: ignore[arg-type]  # as the caller says


async def kept(store: ResponseStore, *names: str) -> list[str]:
    return [name for name in names if await store.load(name) is not None]


def test_what_is_saved_is_loaded_and_saved_again_and_deleted() -> None:
    async def scenario() -> None:
        store = ResponseStore()
        first = response("a", status="in_progress", is_background=True)
        await store.save(first, ["msg_1"])
        events = b"event: x\ndata: {}\n\n" * 10_000
        last = response("a", body=b'{"output":[1]}', events=events, is_background=True)
        await store.save(last, ["msg_1", "msg_2"])
        assert await store.load("a") == last
        found = await store.with_item("msg_2")
        assert found is not None
        assert found.id == "a"
        assert await store.delete("a")
        assert not await store.delete("a")
        assert await store.load("a") is None
        assert await store.with_item("msg_1") is None
        await store.close()

    asyncio.run(scenario())


def test_a_chain_is_given_from_its_beginning_and_only_whole() -> None:
    async def scenario() -> None:
        store = ResponseStore()
        for name, previous in (("a", None), ("b", "a"), ("c", "b")):
            await store.save(response(name, previous_id=previous), [])
        chain = await store.chain("c")
        assert chain is not None
        assert [r.id for r in chain] == ["a", "b", "c"]
        await store.delete("b")
        assert await store.chain("c") is None
        await store.close()

    asyncio.run(scenario())


def test_a_chain_without_end_is_not_read() -> None:
    async def scenario() -> None:
        store = ResponseStore()
        await store.save(response("a", previous_id="b"), [])
        await store.save(response("b", previous_id="a"), [])
        assert await store.chain("a") is None
        assert MAX_CHAIN >= 100
        await store.close()

    asyncio.run(scenario())


def test_a_conversation_is_read_back_up_to_a_number_of_bytes() -> None:
    async def scenario() -> None:
        store = ResponseStore()
        quarter = b"x" * (MAX_CHAIN_BYTES // 4 - len(response("a").body))
        for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")):
            await store.save(response(name, previous_id=previous, items=quarter), [])
        chain = await store.chain("d")
        assert chain is not None
        assert sum(len(each.body) + len(each.items) for each in chain) == MAX_CHAIN_BYTES == 64 << 20
        assert await store.chain("e") is None
        await store.close()

    asyncio.run(scenario())


def test_a_conversation_is_read_back_up_to_a_number_of_responses() -> None:
    async def scenario() -> None:
        store = ResponseStore()
        for i in range(1001):
            await store.save(response(str(i), previous_id=str(i - 1) if i else None), [])
        chain = await store.chain("999")
        assert chain is not None
        assert len(chain) == MAX_CHAIN == 1000
        assert await store.chain("1000") is None
        await store.close()

    asyncio.run(scenario())


def test_nobody_but_the_user_can_read_what_is_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "folder" / "responses.sqlite3"
        store = ResponseStore(str(path))
        await store.open()
        await store.save(response("a", status="in_progress"), [])
        assert path.parent.stat().st_mode & 0o077 == 0
        databases = list(path.parent.glob("*.sqlite3*"))
        assert {each.suffix for each in databases} >= {".sqlite3", ".sqlite3-wal"}
        for each in databases:
            assert each.suffix == ".lock" or each.stat().st_mode & 0o077 == 0, each
        await store.close()

    umask = os.umask(0)
    try:
        asyncio.run(scenario())
    finally:
        os.umask(umask)


def test_the_responses_used_last_are_kept_up_to_a_number() -> None:
    async def scenario() -> None:
        now_s = [0.0]
        store = ResponseStore(retention=Retention(max_responses=3, prune_every=1), clock=lambda: now_s[0])
        for i, name in enumerate("abc"):
            now_s[0] = i
            await store.save(response(name, previous_id="a" if name == "b" else None), [])
        now_s[0] = 3
        await store.chain("b")  # uses a, too
        await store.save(response("d"), [])
        assert await kept(store, *"abcd") == ["a", "b", "d"]
        await store.close()

    asyncio.run(scenario())


def test_old_responses_go_and_so_do_those_beyond_the_bytes_but_never_a_running_one() -> None:
    async def scenario() -> None:
        now_s = [0.0]
        retention = Retention(max_age_s=10, max_bytes=1000, prune_every=1)
        store = ResponseStore(retention=retention, clock=lambda: now_s[0])
        await store.save(response("running", status="in_progress"), [])
        await store.save(response("old"), [])
        now_s[0] = 11
        await store.save(response("large", items=b"x" * 900), [])
        assert await kept(store, "old", "large") == ["large"]
        now_s[0] = 12
        await store.save(response("larger", items=b"x" * 950), [])
        assert await kept(store, "large", "larger") == ["larger"]
        assert await store.delete("running")
        await store.close()

    asyncio.run(scenario())


def test_what_a_dead_frontend_was_making_has_failed_and_a_living_ones_has_not(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite3")
    command = [sys.executable, "-c", OTHER_FRONTEND, path]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other.stdout:
        assert other.stdout.readline() == b"saved\n"

        async def status() -> tuple[str, object]:
            store = ResponseStore(path)
            await store.open()
            found = await store.load("theirs")
            await store.close()
            assert found is not None
            return found.status, json.loads(found.body).get("error")

        assert asyncio.run(status()) == ("in_progress", None)
        other.kill()
        other.wait()
        assert asyncio.run(status()) == ("failed", {"code": "server_error", "message": DIED})
    assert list(tmp_path.glob("*.lock")) == []


def test_a_file_that_cannot_be_used_is_a_named_failure(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "text"):
        (tmp_path / "text").write_text("This is no database, however long one looks at it. " * 100)
        with pytest.raises(StoreFailure, match="cannot be used"):
            asyncio.run(ResponseStore(str(path)).open())


def test_a_file_of_another_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "responses.sqlite3"
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreFailure, match="version 99"):
        asyncio.run(ResponseStore(str(path)).open())
