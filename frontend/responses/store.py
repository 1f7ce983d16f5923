"""Stores responses in a SQLite file with its own thread, bounded by count, age and bytes."""

import asyncio
import contextlib
import fcntl
import glob
import logging
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar

import msgspec

from baton.errors import BatonError

log = logging.getLogger(__name__)

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: ResponseStatus = "in_progress"
MEMORY = ":memory:"
DIED = "The server process stopped before the response was complete; send the request again."
# Limits of the store; the least recently used responses are deleted first. Creating or continuing a response
# marks it and all that it continues as used.
MAX_RESPONSES = 10_000
MAX_AGE_S = 30 * 86_400.0
MAX_BYTES = 1 << 30
PRUNE_EVERY = 32
"""In saves."""
# Limits of a conversation that can be continued.
MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 64 << 20
WAIT_S = 1.0
"""The longest wait of a save for the file; a healthy disk takes milliseconds."""
MAX_UNWRITTEN_BYTES = 64 << 20

# How long another process may hold the file: at the start, and later, when requests wait.
_OPEN_BUSY_S = 5.0
_BUSY_S = 0.2
_OPEN_AGAIN_S = 0.02
_ANSWER_S = 2.0
_FLUSH_S = 5.0
_RETRY_S = 1.0
_VERSION = 1
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
# Without the events: reading a long stream takes long.
_SUMMARY = "SELECT id, previous_id, status, is_background, body, items, key_name FROM responses "
_SAVE = """
INSERT INTO responses
    (id, previous_id, status, is_background, owner, used_s, num_bytes, body, items, events, key_name)
VALUES (:id, :previous_id, :status, :is_background, :owner, :used_s, :num_bytes,
    :body, :items, :events, :key_name)
ON CONFLICT (id) DO UPDATE SET status = excluded.status, used_s = excluded.used_s,
    num_bytes = excluded.num_bytes, body = excluded.body, events = excluded.events
"""
_PRUNE = """
DELETE FROM responses WHERE id IN (
    SELECT id FROM (
        SELECT id, used_s, row_number() OVER latest AS num, sum(num_bytes) OVER latest AS total_bytes
        FROM responses WINDOW latest AS (ORDER BY used_s DESC, rowid DESC)
    ) WHERE used_s < ? OR num > ? OR total_bytes > ?
)
"""
_WITH_ITEM = """
JOIN item_ids ON id = response_id WHERE item_id = ? AND key_name = ? ORDER BY responses.rowid DESC LIMIT 1
"""

T = TypeVar("T")


class StoreFailure(BatonError, code="response_store_failed"):
    """The response store cannot be read or written."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response. `body` is its JSON, `items` the JSON array of its own input items, `events` its
    whole stream, if any, as server-sent events. It belongs to the API key `key_name`, and if that is empty to
    everyone, as long as keys are not checked. While another frontend process runs it, `runs_at` is the
    address of that process, empty if it has none."""

    id: str
    status: str
    body: bytes
    items: bytes
    previous_id: str | None = None
    is_background: bool = False
    events: bytes | None = None
    key_name: str = ""
    runs_at: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items) + len(self.events or b"")


class _Entry(NamedTuple):
    """A response to write. `tried` is set when it is written, cannot be, or need not be."""

    response: StoredResponse
    item_ids: list[str]
    tried: asyncio.Event


class ResponseStore:
    """The store. A saved response is in memory until it is written. While the file cannot be written, the
    newest stay there, `MAX_UNWRITTEN_BYTES` at most, and are tried again each second. Reading raises
    StoreFailure if the file cannot be used. `close()` ends the thread."""

    def __init__(self, path: str = MEMORY, clock: Callable[[], float] = time.time, address: str = "") -> None:
        """`address`: where other frontends reach this process."""
        self.path = path if path == MEMORY else os.path.expanduser(path)
        self.is_failing = False  # new responses stay in memory only
        self._clock = clock
        self._unwritten: dict[str, _Entry] = {}
        self._num_unwritten_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")
        # Only the thread uses these. The owner is this frontend, among those that share the store.
        self._owner = secrets.token_hex(8)
        self._address = address
        self._lock: IO[bytes] | None = None
        self._num_saves = 0

    async def open(self) -> None:
        """Create or open the file."""
        await self._in_thread(lambda: self._db, waits=True)
        await self._in_thread(self._remove_locks, waits=True)

    async def close(self) -> None:
        """Write what is left, unless that takes longer than 5 s, and close the file."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_FLUSH_S)
            self._writing.cancel()
        if self._unwritten:
            log.error("responses lost num=%d", len(self._unwritten))
        await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    async def save(self, response: StoredResponse, item_ids: Iterable[str]) -> None:
        """Insert or update a response. It is found from then on, and soon in the file. Waits for the file at
        most WAIT_S, and not at all while that fails."""
        self._discard(response.id)
        entry = self._unwritten[response.id] = _Entry(response, list(item_ids), asyncio.Event())
        self._num_unwritten_bytes += response.num_bytes
        while self._num_unwritten_bytes > MAX_UNWRITTEN_BYTES:
            oldest = next(iter(self._unwritten))
            self._discard(oldest)
            log.error("response not stored response_id=%s", oldest)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        if not self.is_failing:
            try:
                await asyncio.wait_for(entry.tried.wait(), WAIT_S)
            except TimeoutError:
                self._note(f"it takes longer than {WAIT_S} s")

    async def load(self, response_id: str, key_name: str = "") -> StoredResponse | None:
        """The response, or None unless it is of that API key. A running response of a dead frontend has
        failed, as has one of this frontend: the caller must check its own runs first."""
        entry = self._unwritten.get(response_id)
        found = entry.response if entry else await self._in_thread(self._load, response_id)
        return found if found is not None and found.key_name == key_name else None

    async def chain(self, response_id: str, key_name: str = "") -> list[StoredResponse] | None:
        """The response and all that it continues, oldest first, without events; None if one is missing or not
        of that key. Marks them as used."""
        return await self._in_thread(self._chain, response_id, key_name)

    async def with_item(self, item_id: str, key_name: str = "") -> StoredResponse | None:
        """The latest response of that key with this item in its input or output, perhaps without events."""
        for response, item_ids, _ in reversed(self._unwritten.values()):
            if item_id in item_ids and response.key_name == key_name:
                return response
        return await self._in_thread(self._one, _SUMMARY + _WITH_ITEM, item_id, key_name)

    async def delete(self, response_id: str) -> None:
        """Delete a response, if there is one. Raises StoreFailure: the file may still have it."""
        self._discard(response_id)
        await self._in_thread(self._delete, response_id)

    async def _in_thread(self, work: Callable[..., T], *arguments: object, waits: bool = False) -> T:
        """Do the work in the thread, in 2 s at most unless it `waits`. Raises StoreFailure."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        try:
            if not waits:  # two waits: one is over at once if this process stood still
                await asyncio.wait([done], timeout=_ANSWER_S / 2)
            return await asyncio.wait_for(done, None if waits else _ANSWER_S / 2)
        except TimeoutError:
            raise StoreFailure(f"The response store {self.path} does not answer.") from None
        except (sqlite3.Error, OSError) as error:
            raise StoreFailure(f"The response store {self.path} cannot be used: {error}.") from error

    async def _write_all(self) -> None:
        while self._unwritten:
            response_id, entry = next(iter(self._unwritten.items()))
            try:
                await self._in_thread(self._write, entry, waits=True)
            except StoreFailure as error:
                self._note(error.message)
                for each in self._unwritten.values():
                    each.tried.set()
                await asyncio.sleep(_RETRY_S)  # a disk does not notify
                continue
            self._note("")
            if self._unwritten.get(response_id) is entry:
                self._discard(response_id)

    def _discard(self, response_id: str) -> None:
        entry = self._unwritten.pop(response_id, None)
        if entry is not None:
            entry.tried.set()
            self._num_unwritten_bytes -= entry.response.num_bytes

    def _note(self, failure: str) -> None:
        """Log that the file cannot be written any more, or, without a failure, that it can be again."""
        if self.is_failing != bool(failure):
            self.is_failing = bool(failure)
            log.warning("response_store=%s error=%s", "failing" if failure else "working", failure or None)

    # The rest runs in the thread, and raises OSError or sqlite3.Error.

    @cached_property
    def _db(self) -> sqlite3.Connection:
        return connect(self.path)

    def _close(self) -> None:
        if "_db" in vars(self):
            self._db.close()
        if self._lock is not None:
            self._lock_of(self._owner).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def _lock_of(self, owner: str) -> Path:
        """The lock file of a frontend, which exists from its first background response on. It contains the
        address; the lock itself ends with the process."""
        return Path(f"{self.path}.{owner}.lock")

    def _remove_locks(self) -> None:
        """Remove those of frontends that were killed."""
        path = Path(self.path)
        for lock in path.parent.glob(f"{glob.escape(path.name)}.*.lock"):
            with contextlib.suppress(OSError):
                self._address_of(lock.name.split(".")[-2])

    def _address_of(self, owner: str) -> str | None:
        """The address of another frontend, empty if it has none; None if it is not alive."""
        if self.path == MEMORY or owner == self._owner:
            return None
        path = self._lock_of(owner)
        with contextlib.suppress(FileNotFoundError), path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().decode()
            path.unlink()
        return None

    def _write(self, entry: _Entry) -> None:
        response = entry.response
        if response.status == RUNNING and self.path != MEMORY and self._lock is None:
            path = self._lock_of(self._owner)
            lock = (new := path.with_suffix(".new")).open("wb", buffering=0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(self._address.encode())
            new.rename(path)  # others remove one that is not locked
            self._lock = lock
        events = None if response.events is None else zlib.compress(response.events, 1)
        packed = msgspec.structs.replace(response, events=events)
        owned = {"owner": self._owner, "used_s": self._clock(), "num_bytes": packed.num_bytes}
        with self._db as db:
            db.execute(_SAVE, msgspec.structs.asdict(packed) | owned)
            pairs = [(item_id, response.id) for item_id in entry.item_ids]
            db.executemany("INSERT OR IGNORE INTO item_ids VALUES (?, ?)", pairs)
            if self._num_saves % PRUNE_EVERY == 0:
                db.execute(_PRUNE, (self._clock() - MAX_AGE_S, MAX_RESPONSES, MAX_BYTES))
        self._num_saves += 1

    def _one(self, query: str, *values: str) -> StoredResponse | None:
        row = self._db.execute(query, values).fetchone()
        if row is None:
            return None
        fields = dict(row)
        if fields.get("events") is not None:
            fields["events"] = zlib.decompress(fields["events"])
        return msgspec.convert(fields, StoredResponse, strict=False)  # SQLite has no truth values

    def _load(self, response_id: str) -> StoredResponse | None:
        found = self._one("SELECT *, owner AS runs_at FROM responses WHERE id = ?", response_id)
        if found is None:
            return None
        address = self._address_of(found.runs_at) if found.status == RUNNING else ""
        found = msgspec.structs.replace(found, runs_at=address or "")
        if address is not None:
            return found
        body = msgspec.json.decode(found.body, type=dict[str, Any])
        body |= {"status": "failed", "error": {"code": "server_error", "message": DIED}}
        # The stored events lack the last one.
        return msgspec.structs.replace(found, status="failed", body=msgspec.json.encode(body), events=None)

    def _chain(self, response_id: str, key_name: str) -> list[StoredResponse] | None:
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        num_bytes = 0
        while next_id is not None:
            entry = self._unwritten.get(next_id)  # the loop's thread may remove it
            found = entry.response if entry else self._one(_SUMMARY + "WHERE id = ?", next_id)
            if found is None or found.key_name != key_name:
                return None
            num_bytes += len(found.body) + len(found.items)
            if len(chain) == MAX_CHAIN or num_bytes > MAX_CHAIN_BYTES:
                return None
            chain.append(found)
            next_id = found.previous_id
        with contextlib.suppress(sqlite3.OperationalError), self._db as db:  # full or locked
            used = [(self._clock(), response.id) for response in chain]
            db.executemany("UPDATE responses SET used_s = ? WHERE id = ?", used)
        return chain[::-1]

    def _delete(self, response_id: str) -> None:
        with self._db as db:
            db.execute("DELETE FROM responses WHERE id = ?", (response_id,))


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
    db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version not in {0, _VERSION}:
        raise sqlite3.DatabaseError(f"its schema has version {version}; this server needs {_VERSION}")
    db.executescript(_SCHEMA)
    with db:
        db.execute("BEGIN IMMEDIATE")  # another frontend may start, too
        # Release 0.1 has no such column; it can still use the file.
        if "key_name" not in {row["name"] for row in db.execute("PRAGMA table_info(responses)")}:
            db.execute("ALTER TABLE responses ADD COLUMN key_name TEXT NOT NULL DEFAULT ''")
    db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute(f"PRAGMA busy_timeout = {round(_BUSY_S * 1000)}")
    return db
