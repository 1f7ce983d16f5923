"""Stores responses in a SQLite file with its own thread, bounded by count, age and bytes."""

import asyncio
import contextlib
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from baton.errors import BatonError
from frontend.responses.database import MEMORY, connect
from frontend.responses.object import RUNNING
from frontend.responses.owner import Owner
from frontend.responses.stored import StoredResponse
from frontend.responses.unwritten import Entry, Unwritten

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
