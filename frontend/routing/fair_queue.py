"""Waiting requests: callers take turns, and each caller's requests go by priority, then by age."""

import asyncio
from bisect import insort
from operator import itemgetter

Turn = asyncio.Future[None]


class FairQueue:
    """One future for each waiting request; `pop` returns that of the next one."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, Turn]]] = {}  # by caller; the first one's turn is next
        self._num = 0

    def __len__(self) -> int:
        return self._num

    @property
    def num_callers(self) -> int:
        """How many callers have requests here."""
        return len(self._waiting)

    def num_of(self, caller: str) -> int:
        """How many requests this caller has here."""
        return len(self._waiting.get(caller, ()))

    def add(self, caller: str, priority: int) -> Turn:
        """Append a request; lower priorities go first among the same caller's."""
        turn = asyncio.get_running_loop().create_future()
        insort(self._waiting.setdefault(caller, []), (priority, turn), key=itemgetter(0))
        self._num += 1
        return turn

    def remove(self, caller: str, turn: Turn) -> None:
        """Take out a request that no longer waits."""
        entries = self._waiting[caller]
        entries[:] = [entry for entry in entries if entry[1] is not turn]
        if not entries:
            del self._waiting[caller]
        self._num -= 1

    def pop(self) -> Turn:
        """Take out the next request; its caller's other requests wait until all other callers had a turn."""
        caller = next(iter(self._waiting))
        entries = self._waiting.pop(caller)
        _, turn = entries.pop(0)
        if entries:
            self._waiting[caller] = entries
        self._num -= 1
        return turn
