"""Thoughts, remembered by the ids of the calls they led to and of the items that showed them: clients seldom
send them back, and gpt-oss needs them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from frontend.harmony.conversation import AssistantTurn, Turn

MAX_BYTES = 64 << 20
MAX_AGE_S = 6 * 3600.0
# Of an entry besides its text: the key, the list node and the objects.
_ENTRY_BYTES = 400


class Thoughts:
    """In memory only, bounded in bytes and age; those not used for longest go first.

    An id is random and long, so who has it was told it; `owner` separates those who have keys all the same.
    """

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
        """Remember the thought by these ids, of calls or reasoning items."""
        if not text or _size(text) > self._max_bytes // 8:
            return
        for known_id in ids:
            self._drop((owner, known_id))
            self._by_id[owner, known_id] = text, self._clock()
            self.num_bytes += _size(text)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_id)))

    def recall(self, owner: str, known_id: str) -> str | None:
        """The thought kept by that id, if it is still known."""
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
        """The turns, with the thoughts of calls that came back without. One thought is shown once, though its
        calls may come back one by one."""
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
    """Memory of an entry, with up to 4 bytes a character."""
    return 4 * len(text) + _ENTRY_BYTES
