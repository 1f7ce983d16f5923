"""Caches reasoning by call and item id: gpt-oss needs it back, and clients rarely send it."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from frontend.harmony.conversation import AssistantTurn, Turn

MAX_BYTES = 64 << 20
MAX_AGE_S = 6 * 3600.0
# Overhead of an entry: the key, the list node and the objects.
_ENTRY_BYTES = 400


class Thoughts:
    """An in-memory LRU cache, bounded in bytes and age. Ids cannot be guessed; `owner` separates API keys all
    the same."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_id: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def keep(self, owner: str, ids: Iterable[str], text: str) -> None:
        """Keep the reasoning text under these ids of calls or reasoning items."""
        if not text or _size(text) > self._max_bytes // 8:
            return
        for known_id in ids:
            self._drop((owner, known_id))
            self._by_id[owner, known_id] = text, self._clock()
            self.num_bytes += _size(text)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_id)))

    def recall(self, owner: str, known_id: str) -> str | None:
        """The reasoning text kept under that id, or None."""
        key = (owner, known_id)
        text, since_s = self._by_id.get(key, (None, 0.0))
        if text is None:
            return None
        if self._clock() - since_s > self._max_age_s:
            self._drop(key)
            return None
        self._by_id.move_to_end(key)
        return text

    def completed(self, owner: str, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns, with missing reasoning restored to those with calls. Reasoning shared by several calls
        is restored once, even if they come back in separate turns."""
        completed: list[Turn] = []
        shown: str | None = None
        for turn in turns:
            if isinstance(turn, AssistantTurn) and turn.tool_calls and not turn.reasoning:
                thought = self.recall(owner, turn.tool_calls[0].call_id)
                if thought is not None and thought != shown:
                    shown = thought
                    completed.append(replace(turn, reasoning=thought))
                    continue
            completed.append(turn)
        return tuple(completed)

    def _drop(self, key: tuple[str, str]) -> None:
        dropped = self._by_id.pop(key, None)
        if dropped is not None:
            self.num_bytes -= _size(dropped[0])


def _size(text: str) -> int:
    """Memory of an entry, at up to 4 bytes per character."""
    return 4 * len(text) + _ENTRY_BYTES
