"""Replies of one answer, between what makes them and the one that reads them."""

import asyncio

from baton.errors import BatonError
from baton.messages import Reply, TokenChunk

WINDOW = 256
"""Maximum unconsumed replies of one stream."""
_MOST_MERGED_TOKENS = 64


class Wakeup:
    """Wakes one waiting task; does nothing if no task waits."""

    _waiter: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        self._waiter = asyncio.Future()
        return self._waiter

    def set(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class Replies:
    """What has arrived of an answer, and how it ended. Plain token chunks that wait for the reader are one
    chunk; `num_waiting` counts what was added, and `num_taken` what of that was taken.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.num_waiting = self.num_taken = 0
        self._waiting: list[Reply] = []
        self.error: BatonError | type[BatonError] | None = None
        self._is_left = False
        self._arrived, self._room = Wakeup(), Wakeup()

    def add(self, reply: Reply) -> None:
        self.num_waiting += 1
        waiting = self._waiting
        both = _merged(waiting[-1], reply) if waiting else None
        if both is None:
            waiting.append(reply)
            self._arrived.set()
        else:
            waiting[-1] = both

    async def put(self, reply: Reply) -> None:
        """Add a reply, and wait for a reader that is far behind."""
        self.add(reply)
        while self.num_waiting >= WINDOW and not self._is_left:
            await self._room.wait()

    def end(self, error: BatonError | type[BatonError] | None = None) -> None:
        """No more replies follow; those that wait are read first. The first end counts."""
        if not self.has_ended:
            self.has_ended, self.error = True, error
            self._arrived.set()

    def leave(self) -> None:
        """Nothing is read any more."""
        self._is_left = True
        self._room.set()

    async def take(self) -> list[Reply]:
        """All that wait, at least one; none after the last. Raises the error that ended the answer."""
        while not self._waiting:
            if self.has_ended:
                if self.error is not None:
                    raise self.error
                break
            await self._arrived.wait()
        replies, self._waiting = self._waiting, []
        if self.num_waiting >= WINDOW:
            self._room.set()
        self.num_taken += self.num_waiting
        self.num_waiting = 0
        return replies


def _merged(first: Reply, then: Reply) -> TokenChunk | None:
    """Both chunks in one, so that a reader that falls behind catches up; None if one of them is more than
    tokens.
    """
    if type(first) is not TokenChunk or type(then) is not TokenChunk or first.finish_reason is not None:
        return None
    if len(first.token_ids) >= _MOST_MERGED_TOKENS:  # each merge copies them
        return None
    if (first.logprobs, first.prompt_logprobs, then.logprobs, then.prompt_logprobs) != (None,) * 4:
        return None
    return TokenChunk(first.token_ids + then.token_ids, then.finish_reason, then.usage or first.usage)
