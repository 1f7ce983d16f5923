"""The database of the stored responses, without a file."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontend.responses import store
from frontend.responses.store import MEMORY, connect


def test_a_store_in_memory_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(connect(MEMORY)) as db:
        assert db.execute("SELECT count(*) FROM responses").fetchone()[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_connection_follows_references_and_waits_a_moment_only(tmp_path: Path) -> None:
    settings = {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 200}
    with closing(connect(str(tmp_path / "responses"))) as db:
        assert {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in settings} == settings


def test_a_file_that_stays_locked_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store._OPEN_BUSY_S == 5.0  # noqa: SLF001  changed below
    monkeypatch.setattr(store, "_OPEN_BUSY_S", 0.01)
    path = str(tmp_path / "responses")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            connect(path)


def test_a_file_that_is_no_database_is_given_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(_: float) -> None:
        pytest.fail("it waits")

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    path = tmp_path / "responses"
    path.write_bytes(b"x" * 10_000)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        connect(str(path))
