"""Caches reasoning by call and item id: gpt-oss needs it back, and clients rarely send it."""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from frontend.harmony.conversation import AssistantTurn, Conversation, Turn
from frontend.turn.written import PARAGRAPH, WrittenTurn

MAX_BYTES = 64 << 20
MAX_AGE_S = 6 * 3600.0
# Overhead of an entry: the key, the list node and the objects.
_ENTRY_BYTES = 400


class Kept(msgspec.Struct, frozen=True):
    """An entry: reasoning, or a whole answer."""

    owner: str
    ids: tuple[str, ...]
    value: str | WrittenTurn


class Thoughts:
    """An in-memory LRU cache, bounded in bytes and age. Ids cannot be guessed; `owner` separates API keys all
    the same. `share` is called with each entry that this process adds. Thread-safe."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[Kept], object] = lambda _: None,
    ) -> None:
        self.num_bytes = 0
        self._share = share
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._by_id: OrderedDict[tuple[str, str], tuple[str | WrittenTurn, float]] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, owner: str, ids: Iterable[str], text: str) -> None:
        """Keep the reasoning text under these ids of calls or reasoning items."""
        if text:
            self._keep(Kept(owner, tuple(ids), text))

    def keep_turn(self, owner: str, call_ids: Sequence[str], turn: WrittenTurn) -> None:
        """Keep an answer under its call ids or, without calls, under its visible text: then without its
        reasoning, which no later prompt shows."""
        if call_ids:
            self._keep(Kept(owner, tuple(call_ids), turn))
        elif turn.said:
            messages = tuple(message for message in turn.messages if message.kind != "thought")
            # Without a date: other conversations have answers of the same text.
            self._keep(Kept(owner, (_key(turn.said),), WrittenTurn(messages=messages)))

    def _keep(self, kept: Kept) -> None:
        if _size(kept.value) <= self._max_bytes // 8:
            self.take(kept)
            self._share(kept)

    def take(self, kept: Kept) -> None:
        """Add an entry that another process shares."""
        with self._lock:
            for known_id in kept.ids:
                key = kept.owner, known_id
                self._drop(key)
                self._by_id[key] = kept.value, self._clock()
                self.num_bytes += _size(kept.value)
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._by_id)))

    def recall(self, owner: str, known_id: str) -> str | None:
        """The reasoning text kept under that id, or None."""
        value = self._recall(owner, known_id)
        return value.thought if isinstance(value, WrittenTurn) else value

    def _recall(self, owner: str, known_id: str) -> str | WrittenTurn | None:
        key = (owner, known_id)
        with self._lock:
            value, since_s = self._by_id.get(key, (None, 0.0))
            if value is None:
                return None
            if self._clock() - since_s > self._max_age_s:
                self._drop(key)
                return None
            self._by_id.move_to_end(key)
            return value

    def resumed(self, owner: str, talk: Conversation, today: str) -> Conversation:
        """The conversation with its turns `completed` and the date on which it began, as Harmony has it: that
        of its last answer with calls if this is known here, otherwise `today`. Midnight would change every
        prompt near its start, and no worker's KV would be of use.
        """
        answers = (turn for turn in reversed(talk.turns) if isinstance(turn, AssistantTurn))
        last = next((answer for answer in answers if answer.tool_calls), None)
        known = self._known(owner, last) if last else None
        date = known.current_date if known else None
        return replace(talk, turns=self.completed(owner, talk.turns), current_date=date or today)

    def completed(self, owner: str, turns: Sequence[Turn]) -> tuple[Turn, ...]:
        """The turns, with the original tokens of answers that came back unchanged, and missing reasoning
        restored to those with calls. Reasoning shared by several calls is restored once, even if they come
        back in separate turns."""
        completed: list[Turn] = []
        shown: str | None = None
        for turn in turns:
            written = self._known(owner, turn) if isinstance(turn, AssistantTurn) else None
            if written is not None:
                completed.append(replace(turn, written=written.messages))
                continue
            if isinstance(turn, AssistantTurn) and turn.tool_calls and not turn.reasoning:
                thought = self.recall(owner, turn.tool_calls[0].call_id)
                if thought and thought != shown:
                    shown = thought
                    completed.append(replace(turn, reasoning=thought))
                    continue
            completed.append(turn)
        return tuple(completed)

    def _known(self, owner: str, turn: AssistantTurn) -> WrittenTurn | None:
        """The turn as the model wrote it, if that is known."""
        said = PARAGRAPH.join(text for text in (turn.preamble, turn.text) if text)
        key = turn.tool_calls[0].call_id if turn.tool_calls else _key(said)
        known = self._recall(owner, key)
        if not isinstance(known, WrittenTurn) or not known.is_told_by(turn):
            return None
        return known

    def _drop(self, key: tuple[str, str]) -> None:
        dropped = self._by_id.pop(key, None)
        if dropped is not None:
            self.num_bytes -= _size(dropped[0])


def _key(said: str) -> str:
    """The id of an answer without calls."""
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()


def _size(value: str | WrittenTurn) -> int:
    """Memory of an entry, at up to 4 bytes per character."""
    num_bytes = value.num_bytes if isinstance(value, WrittenTurn) else 4 * len(value)
    return num_bytes + _ENTRY_BYTES
