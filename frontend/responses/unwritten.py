"""Responses that are not in the store's file yet: they are found here, and one task writes them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from baton.errors import BatonError
from frontend.responses.stored import StoredResponse

log = logging.getLogger(__name__)

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
