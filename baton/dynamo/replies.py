"""Replies between the task that makes them and the one that reads them."""

from collections.abc import AsyncGenerator

from baton.messages import Reply
from baton.streams import Wakeup, merged

_MOST_WAITING = 1024


class Replies:
    """Those of one call. Tokens that wait for the reader become one chunk."""

    def __init__(self) -> None:
        self.has_ended = False
        self._error: Exception | None = None
        self._waiting: list[Reply] = []
        self._is_left = False
        self._wakeup, self._room = Wakeup(), Wakeup()

    async def put(self, reply: Reply) -> None:
        """Add a reply; waits for a reader that is far behind."""
        last = self._waiting[-1] if self._waiting else None
        both = None if last is None else merged(last, reply)
        if both is not None:
            self._waiting[-1] = both
            return
        self._waiting.append(reply)
        self._wakeup.set()
        while len(self._waiting) >= _MOST_WAITING and not self._is_left:
            await self._room.wait()

    def end(self, error: Exception | None = None) -> None:
        """No more replies follow; those that wait are read first."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._wakeup.set()

    def leave(self) -> None:
        """Nothing is read any more."""
        self._is_left = True
        self._room.set()

    async def read(self) -> AsyncGenerator[Reply, None]:
        """The replies. Raises the error that ended them."""
        while True:
            replies, self._waiting = self._waiting, []
            self._room.set()
            for reply in replies:
                yield reply
            if self._waiting:
                continue
            if self.has_ended:
                break
            await self._wakeup.wait()
        if self._error is not None:
            raise self._error
