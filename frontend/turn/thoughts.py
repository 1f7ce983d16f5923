"""Thoughts remembered by the calls they led to: clients seldom send them back, and gpt-oss needs them."""

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
        self._by_call: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()

    def keep(self, owner: str, call_ids: Iterable[str], text: str) -> None:
        """Remember that these calls came from this thought."""
        if not text or _size(text) > self._max_bytes // 8:
            return
        for call_id in call_ids:
            self._drop((owner, call_id))
            self._by_call[owner, call_id] = text, self._clock()
            self.num_bytes += _size(text)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._by_call)))

    def recall(self, owner: str, call_id: str) -> str | None:
        """The thought that led to the call, if it is still known."""
        key = (owner, call_id)
        text, since_s = self._by_call.get(key, (None, 0.0))
        if text is None:
            return None
        if self._clock() - since_s > self._max_age_s:
            self._drop(key)
            return None
        self._by_call.move_to_end(key)
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
        dropped = self._by_call.pop(key, None)
        if dropped is not None:
            self.num_bytes -= _size(dropped[0])


def _size(text: str) -> int:
    """Memory of an entry, with up to 4 bytes a character."""
    return 4 * len(text) + _ENTRY_BYTES
