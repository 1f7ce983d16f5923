"""Stores responses in a SQLite file with its own thread, bounded by count, age and bytes."""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from baton.errors import BatonError
from frontend.responses.items import RUNNING
from frontend.responses.stored import StoredResponse

log = logging.getLogger(__name__)

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


class Owner:
    """This frontend, among those that share the store at `path` (None: not shared).

    The lock file exists from the first background response on, and contains the `address` of this process;
    the kernel releases the lock when the process dies.
    """

    def __init__(self, path: str | None, address: str = "") -> None:
        self.name = secrets.token_hex(8)
        self._address = address
        self._path = path
        self._lock: IO[bytes] | None = None

    def claim(self) -> None:
        """Take the lock that shows that this frontend is alive. Raises OSError."""
        if self._path is None or self._lock is not None:
            return
        lock = self._lock_file(self.name).open("wb", buffering=0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(self._address.encode())
        self._lock = lock

    def lives_elsewhere(self, name: str) -> bool:
        """Whether `name` is another frontend that is alive."""
        if self._path is None or name == self.name:
            return False
        path = self._lock_file(name)
        try:
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return False

    def address_of(self, name: str) -> str:
        """The address of another frontend that is alive, empty if it has none."""
        with contextlib.suppress(FileNotFoundError):
            return self._lock_file(name).read_text()
        return ""

    def close(self) -> None:
        """Release and remove the lock file."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                self._lock_file(self.name).unlink()
            self._lock.close()
            self._lock = None

    def _lock_file(self, name: str) -> Path:
        return Path(f"{self._path}.{name}.lock")


WAIT_S = 1.0
"""How long a save waits for the file, unless writing fails; a healthy disk takes milliseconds."""
MAX_UNWRITTEN_BYTES = 64 << 20
_RETRY_S = 1.0
_BATCH = 32


class Entry:
    """One response, and the ids of its items. It replaces the file's version unless it is new: one that is no
    longer there was deleted.
    """

    def __init__(self, response: StoredResponse, item_ids: Sequence[str], *, is_new: bool) -> None:
        self.response = response
        self.item_ids = item_ids
        self.is_new = is_new
        self.tried = asyncio.Event()  # set when it is written, cannot be, or need not be any more


class Unwritten:
    """The responses between a save and the file, by id. While the file cannot be written, the newest of them
    stay, `MAX_UNWRITTEN_BYTES` at most, and are tried again each second.
    """

    def __init__(self, write: Callable[[Sequence[Entry]], Awaitable[None]]) -> None:
        """`write` raises a BatonError if the file cannot be used."""
        self.is_failing = False
        self._write = write
        self._entries: dict[str, Entry] = {}
        self._num_bytes = 0
        self._writing: asyncio.Task[None] | None = None

    async def add(self, response: StoredResponse, item_ids: Sequence[str]) -> None:
        """Have a response written. Waits for that at most WAIT_S, and not at all while writing fails."""
        earlier = self._entries.get(response.id)
        is_new = response.is_first if earlier is None else earlier.is_new
        self.discard(response.id)
        entry = self._entries[response.id] = Entry(response, item_ids, is_new=is_new)
        self._num_bytes += response.num_bytes
        self._drop_oldest()
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        if not self.is_failing:
            try:
                await asyncio.wait_for(entry.tried.wait(), WAIT_S)
            except TimeoutError:
                self._note(f"it takes longer than {WAIT_S} s")

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, if it is not written yet. Safe in any thread."""
        entry = self._entries.get(response_id)
        return None if entry is None else entry.response

    def with_item(self, item_id: str, key_name: str) -> StoredResponse | None:
        """The latest of them that has this item and is of that key."""
        found = (each.response for each in reversed(self._entries.values()) if item_id in each.item_ids)
        return next((response for response in found if response.key_name == key_name), None)

    def discard(self, response_id: str) -> None:
        """Forget a response."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            entry.tried.set()
            self._num_bytes -= entry.response.num_bytes

    async def flush(self, timeout_s: float) -> None:
        """Write all, unless that takes longer."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=timeout_s)
            self._writing.cancel()
        if self._entries:
            log.error("responses lost num=%d", len(self._entries))

    async def _write_all(self) -> None:
        while self._entries:
            batch = list(self._entries.values())[:_BATCH]
            try:
                await self._write(batch)
            except BatonError as error:
                self._note(error.message)
                for entry in batch:
                    entry.tried.set()
                await asyncio.sleep(_RETRY_S)  # a disk does not notify
                continue
            self._note(None)
            for entry in batch:
                current = self._entries.get(entry.response.id)
                if current is entry:
                    self.discard(entry.response.id)
                elif current is not None:
                    current.is_new = False

    def _drop_oldest(self) -> None:
        while self._num_bytes > MAX_UNWRITTEN_BYTES:
            oldest = next(iter(self._entries))
            self.discard(oldest)
            log.error("response not stored response_id=%s reason=too many wait for the disk", oldest)

    def _note(self, failure: str | None) -> None:
        if failure is not None and not self.is_failing:
            log.error("response_store=failing responses are kept in memory only error=%s", failure)
        elif failure is None and self.is_failing:
            log.info("response_store=working")
        self.is_failing = failure is not None


DIED = "The server process stopped before the response was complete; send the request again."
# Limits of a conversation that can be continued.
MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 64 << 20

_ANSWER_S = 2.0
_FLUSH_S = 5.0
_COLUMNS = "id, previous_id, status, is_background, owner, num_bytes, body, items, key_name"
_SAVE = """
INSERT INTO responses
    (id, previous_id, status, is_background, owner, used_s, num_bytes, body, items, events, key_name)
SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ? WHERE ? OR EXISTS (SELECT 1 FROM responses WHERE id = ?)
ON CONFLICT (id) DO UPDATE SET status = excluded.status, used_s = excluded.used_s,
    num_bytes = excluded.num_bytes, body = excluded.body, events = excluded.events
"""
_TOO_MANY = """
DELETE FROM responses WHERE status != 'in_progress' AND id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER latest AS num, sum(num_bytes) OVER latest AS total_bytes
        FROM responses WINDOW latest AS (ORDER BY used_s DESC, rowid DESC)
    ) WHERE num > ? OR total_bytes > ?
)
"""

T = TypeVar("T")


class StoreFailure(BatonError):
    """The response store cannot be read or written."""

    code = "response_store_failed"


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the store; the least recently used responses are deleted first. Creating or continuing a
    response marks it and all that it continues as used. Pruning runs every `prune_every` saves."""

    max_responses: int = 10_000
    max_age_s: float = 30 * 86_400.0
    max_bytes: int = 1 << 30
    prune_every: int = 32


class ResponseStore:
    """The store. Reading raises StoreFailure if the file cannot be used; what cannot be written is kept in
    memory. `close()` ends the thread.
    """

    def __init__(
        self,
        path: str = MEMORY,
        retention: Retention | None = None,
        clock: Callable[[], float] = time.time,
        address: str = "",
    ) -> None:
        """`address`: where other frontends reach this process."""
        self.path = path if path == MEMORY else os.path.expanduser(path)
        self._retention = retention or Retention()
        self._clock = clock
        self._owner = Owner(None if path == MEMORY else self.path, address)
        self._db: sqlite3.Connection | None = None
        self._num_saves = 0
        self._unwritten = Unwritten(self._write)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="responses")

    @property
    def is_failing(self) -> bool:
        """Whether new responses stay in memory only."""
        return self._unwritten.is_failing

    async def open(self) -> None:
        """Create or open the file, and mark responses of dead frontends as failed."""
        await self._in_thread(self._settle_orphans, is_patient=True)

    async def close(self) -> None:
        """Close the file."""
        await self._unwritten.flush(_FLUSH_S)
        await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    async def save(self, response: StoredResponse, item_ids: Iterable[str]) -> None:
        """Insert or update a response. It is found from then on, and soon in the file, unless another
        frontend has deleted it there."""
        await self._unwritten.add(response, list(item_ids))

    async def load(self, response_id: str, key_name: str = "") -> StoredResponse | None:
        """The response, or None unless it is of that API key. A running response of a dead frontend becomes
        failed, as does one of this frontend: the caller must check its own runs first."""
        found = self._unwritten.find(response_id)
        if found is not None:
            return found if found.key_name == key_name else None
        return await self._in_thread(self._load, response_id, key_name)

    async def chain(self, response_id: str, key_name: str = "") -> list[StoredResponse] | None:
        """The response and all that it continues, oldest first, without events; None if one is missing or not
        of that key. Marks them as used."""
        return await self._in_thread(self._chain, response_id, key_name)

    async def with_item(self, item_id: str, key_name: str = "") -> StoredResponse | None:
        """The latest response of that key with this item in its input or output."""
        unwritten = self._unwritten.with_item(item_id, key_name)
        if unwritten is not None:
            return unwritten
        return await self._in_thread(self._with_item, item_id, key_name)

    async def delete(self, response_id: str) -> bool:
        """Delete a response; returns whether it existed."""
        is_unwritten = self._unwritten.find(response_id) is not None
        was_written = await self._in_thread(self._delete, response_id)
        if is_unwritten:
            self._unwritten.discard(response_id)
            await self._in_thread(self._delete, response_id)  # it may have been written meanwhile
        return is_unwritten or was_written

    async def _write(self, entries: Sequence[Entry]) -> None:
        await self._in_thread(self._save, entries, is_patient=True)

    async def _in_thread(self, work: Callable[..., T], *arguments: object, is_patient: bool = False) -> T:
        done = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        try:
            return await asyncio.wait_for(done, None if is_patient else _ANSWER_S)
        except TimeoutError:
            raise StoreFailure(f"The response store {self.path} does not answer.") from None
        except (sqlite3.Error, OSError) as error:
            raise StoreFailure(f"The response store {self.path} cannot be used: {error}.") from error

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            self._db = connect(self.path)
        return self._db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        self._owner.close()

    def _save(self, entries: Sequence[Entry]) -> None:
        with self._connection() as db:
            for num_saved, entry in enumerate(entries, self._num_saves):
                self._save_one(db, entry)
                if num_saved % self._retention.prune_every == 0:
                    self._prune(db)
        self._num_saves += len(entries)

    def _save_one(self, db: sqlite3.Connection, entry: Entry) -> None:
        response = entry.response
        if response.status == RUNNING:
            self._owner.claim()
        events = None if response.events is None else zlib.compress(response.events, 1)
        num_bytes = len(response.body) + len(response.items) + len(events or b"")
        values = (
            response.id, response.previous_id, response.status, response.is_background, self._owner.name,
            self._clock(), num_bytes, response.body, response.items, events, response.key_name,
            entry.is_new, response.id,
        )  # fmt: skip
        if db.execute(_SAVE, values).rowcount:
            pairs = [(item_id, response.id) for item_id in entry.item_ids]
            db.executemany("INSERT OR IGNORE INTO item_ids VALUES (?, ?)", pairs)

    def _prune(self, db: sqlite3.Connection) -> None:
        kept = self._retention
        oldest_s = self._clock() - kept.max_age_s
        db.execute("DELETE FROM responses WHERE used_s < ? AND status != 'in_progress'", (oldest_s,))
        db.execute(_TOO_MANY, (kept.max_responses, kept.max_bytes))

    def _load(self, response_id: str, key_name: str) -> StoredResponse | None:
        row = self._row(response_id, "*")
        if row is None or row["key_name"] != key_name:
            return None
        if row["status"] != RUNNING:
            return _stored(row)
        if self._owner.lives_elsewhere(row["owner"]):
            return msgspec.structs.replace(_stored(row), runs_at=self._owner.address_of(row["owner"]))
        self._fail(row)
        row = self._row(response_id, "*")
        return None if row is None else _stored(row)

    def _row(self, response_id: str, columns: str = _COLUMNS) -> sqlite3.Row | None:
        query = f"SELECT {columns} FROM responses WHERE id = ?"  # noqa: S608 the columns are ours
        found = self._connection().execute(query, (response_id,))
        row: sqlite3.Row | None = found.fetchone()
        return row

    def _settle_orphans(self) -> None:
        rows = self._connection().execute("SELECT * FROM responses WHERE status = 'in_progress'").fetchall()
        for row in rows:
            if not self._owner.lives_elsewhere(row["owner"]):
                self._fail(row)

    def _fail(self, row: sqlite3.Row) -> None:
        body = msgspec.json.decode(row["body"], type=dict[str, Any])
        body |= {"status": "failed", "error": {"code": "server_error", "message": DIED}}
        with contextlib.suppress(sqlite3.OperationalError), self._connection() as db:  # full or locked
            values = (msgspec.json.encode(body), row["id"])
            # Its events lack the last one.
            db.execute("UPDATE responses SET status = 'failed', body = ?, events = NULL WHERE id = ?", values)

    def _chain(self, response_id: str, key_name: str) -> list[StoredResponse] | None:
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        num_bytes = 0
        while next_id is not None:
            found = self._unwritten.find(next_id)
            row = self._row(next_id) if found is None else None
            if row is not None:
                found = _stored(row)
                num_bytes += row["num_bytes"]
            if found is None or found.key_name != key_name:
                return None
            if len(chain) == MAX_CHAIN or num_bytes > MAX_CHAIN_BYTES:
                return None
            chain.append(found)
            next_id = found.previous_id
        with contextlib.suppress(sqlite3.OperationalError), self._connection() as db:  # full or locked
            used = [(self._clock(), response.id) for response in chain]
            db.executemany("UPDATE responses SET used_s = ? WHERE id = ?", used)
        return chain[::-1]

    def _with_item(self, item_id: str, key_name: str) -> StoredResponse | None:
        query = (
            "SELECT responses.* FROM item_ids JOIN responses ON id = response_id "
            "WHERE item_id = ? AND key_name = ? ORDER BY responses.rowid DESC LIMIT 1"
        )
        row = self._connection().execute(query, (item_id, key_name)).fetchone()
        return None if row is None else _stored(row)

    def _delete(self, response_id: str) -> bool:
        with self._connection() as db:
            return db.execute("DELETE FROM responses WHERE id = ?", (response_id,)).rowcount > 0


def _stored(row: sqlite3.Row) -> StoredResponse:
    events = row["events"] if "events" in row.keys() else None  # noqa: SIM118 a Row iterates over values
    return StoredResponse(
        id=row["id"],
        previous_id=row["previous_id"],
        status=row["status"],
        is_background=bool(row["is_background"]),
        body=row["body"],
        items=row["items"],
        events=None if events is None else zlib.decompress(events),
        key_name=row["key_name"],
    )
