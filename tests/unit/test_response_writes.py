"""How the response store uses its file and its thread: batches, retries, patience, and the end."""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from frontend.responses import store as store_module
from frontend.responses.store import (
    MAX_UNWRITTEN_BYTES,
    WAIT_S,
    Entry,
    ResponseStore,
    StoreFailure,
    Unwritten,
)
from tests.clock import run_jumping
from tests.stored_responses import response
from tests.waiting import until

# All unit tests run with longer ones.
WAITS_S = (WAIT_S, store_module._ANSWER_S, store_module._FLUSH_S)  # noqa: SLF001  nothing else shows them


def test_nothing_waits_long_for_a_slow_disk() -> None:
    async def scenario() -> None:
        unwritten = Unwritten(lambda _: asyncio.sleep(1000))
        adding = asyncio.create_task(unwritten.add(response("a"), []))
        await asyncio.sleep(0)  # it writes now
        await unwritten.flush(5)
        assert asyncio.get_running_loop().time() == 5
        adding.cancel()

    run_jumping(scenario())
    assert WAITS_S == (1.0, 2.0, 5.0)
    assert MAX_UNWRITTEN_BYTES == 64 << 20


def test_what_cannot_be_written_is_tried_again_each_second_until_the_end() -> None:
    async def scenario() -> None:
        num_tries = 0

        async def fails(_: object) -> None:
            nonlocal num_tries
            num_tries += 1
            raise StoreFailure("full")

        unwritten = Unwritten(fails)
        await unwritten.add(response("a"), [])
        assert (asyncio.get_running_loop().time(), num_tries) == (0, 1)
        await asyncio.sleep(10.5)
        assert num_tries == 11
        await unwritten.flush(0)
        await asyncio.sleep(10)
        assert num_tries == 11

    run_jumping(scenario())


@pytest.mark.parametrize("is_failing", [False, True])
def test_many_responses_are_written_a_few_at_a_time(is_failing: bool) -> None:
    async def scenario() -> None:
        batches: list[list[str]] = []
        can_write = not is_failing

        async def write(entries: Sequence[Entry]) -> None:
            if not can_write:
                raise StoreFailure("full")
            batches.append([entry.response.id for entry in entries])

        unwritten = Unwritten(write)
        names = [str(i) for i in range(100)]
        await asyncio.gather(*(unwritten.add(response(name), []) for name in names))
        can_write = True
        await unwritten.flush(10)
        assert [name for batch in batches for name in batch] == names
        assert 10 < max(map(len, batches)) <= 32

    run_jumping(scenario())


async def test_opening_waits_for_a_process_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "responses.sqlite3"
    first, second = ResponseStore(str(path)), ResponseStore(str(path))
    await first.open()
    with (
        monkeypatch.context() as impatient,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        impatient.setattr(store_module, "_ANSWER_S", 0.001)
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(second.open())
        await asyncio.sleep(0.05)  # longer than a request would wait
        assert not opening.done()
        other.execute("COMMIT")
        await opening
    await first.close()
    await second.close()


async def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())
    store = ResponseStore()
    await store.save(response("a"), [])
    (own,) = set(threading.enumerate()) - before
    await store.close()
    await until(lambda: not own.is_alive())
    assert store.path
