"""The SQLite file of the stored responses: its schema, and how it is opened."""

import os
import sqlite3
import time
from pathlib import Path

SCHEMA_VERSION = 1
MEMORY = ":memory:"

# Another process may hold the file for so long: at the start, and later, when requests wait.
_OPEN_BUSY_S = 5.0
_BUSY_S = 0.2
_OPEN_AGAIN_S = 0.02
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous_id TEXT, status TEXT NOT NULL, is_background INTEGER NOT NULL,
    owner TEXT NOT NULL, used_s REAL NOT NULL, num_bytes INTEGER NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL, events BLOB
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_s, num_bytes, status);
CREATE TABLE IF NOT EXISTS item_ids (
    item_id TEXT NOT NULL, response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    PRIMARY KEY (item_id, response_id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS item_ids_by_response ON item_ids (response_id);
"""


def connect(path: str) -> sqlite3.Connection:
    """Open or create the file. Raises OSError or sqlite3.Error."""
    if path != MEMORY:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Conversations are private; SQLite gives its other files the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    give_up_s = time.monotonic() + _OPEN_BUSY_S
    while True:
        db = sqlite3.connect(path, timeout=_OPEN_BUSY_S)
        try:
            return _set_up(db)
        except sqlite3.Error as error:
            db.close()
            is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() > give_up_s:
                raise
            # SQLite does not wait for another process that turns a new file's log on, too.
            time.sleep(_OPEN_AGAIN_S)


def _set_up(db: sqlite3.Connection) -> sqlite3.Connection:
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA foreign_keys = ON")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in {0, SCHEMA_VERSION}:
        raise sqlite3.DatabaseError(f"its schema has version {version}; this server needs {SCHEMA_VERSION}")
    db.executescript(_SCHEMA)
    _add_key_name(db)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute(f"PRAGMA busy_timeout = {round(_BUSY_S * 1000)}")
    return db


def _add_key_name(db: sqlite3.Connection) -> None:
    """Add the column that files of earlier releases lack. These can still use the file: they store responses
    that belong to no key.
    """
    with db:
        db.execute("BEGIN IMMEDIATE")  # another frontend may start, too
        if "key_name" not in {row["name"] for row in db.execute("PRAGMA table_info(responses)")}:
            db.execute("ALTER TABLE responses ADD COLUMN key_name TEXT NOT NULL DEFAULT ''")
