"""Keeps reasoning and answers as the model wrote them, for later prompts: clients rarely send them back."""

import hashlib
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Delta,
    Kind,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallStart,
    Turn,
    WrittenMessage,
)
from frontend.text.specials import Segment, SpecialToken
from frontend.text.tokenizer import ModelTokenizer, TooManyTokens

# Separates two Harmony messages of one kind, such as a preamble and the answer.
PARAGRAPH = "\n\n"
_ENDS = (SpecialToken.END, SpecialToken.CALL, SpecialToken.RETURN)


class WrittenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A complete answer: its messages, the names of the tools they call, in order, and its prompt's date."""

    messages: tuple[WrittenMessage, ...]
    call_names: tuple[str, ...] = ()
    current_date: str | None = None

    @property
    def thought(self) -> str:
        """The reasoning text."""
        return "".join(message.text for message in self.messages if message.kind == "thought")

    @property
    def said(self) -> str:
        """The visible text, as the chat API joins it."""
        return PARAGRAPH.join(message.text for message in self.messages if message.kind == "text")

    @property
    def num_bytes(self) -> int:
        """Memory of texts and tokens, with up to 4 bytes a character."""
        return sum(4 * len(message.text) + 4 * len(message.token_ids) for message in self.messages)

    def is_told_by(self, turn: AssistantTurn) -> bool:
        """Whether a turn of the history has the same content. Clients may omit the reasoning, and that of a
        final answer is never shown again."""
        thoughts = [message.text for message in self.messages if message.kind == "thought"]
        if turn.tool_calls and turn.reasoning not in {None, "", "".join(thoughts), PARAGRAPH.join(thoughts)}:
            return False
        if PARAGRAPH.join(text for text in (turn.preamble, turn.text) if text) != self.said:
            return False
        called = [message.text for message in self.messages if message.kind == "call"]
        return len(called) == len(turn.tool_calls) and all(
            call.called == name and _is_same_call(call, arguments)
            for call, name, arguments in zip(turn.tool_calls, self.call_names, called, strict=True)
        )


class Writing:
    """Collects an answer's tokens and the kinds of its messages as the parser reports them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.kind: Kind | None = None
        self._kinds: list[Kind | None] = []
        self._call_names: list[str] = []

    def note(self, delta: Delta) -> None:
        """Take what the tokens were parsed as."""
        match delta:
            case TextDelta():
                self.kind = "text"
            case ReasoningDelta():
                self.kind = "thought"
            case ToolCallStart():
                self.kind = "call"
                self._call_names.append(delta.name)
            case MessageEnd():
                self._kinds.append(self.kind)
                self.kind = None

    def turn(self, tokenizer: ModelTokenizer) -> WrittenTurn | None:
        """The whole answer; None if the tokens do not match the parsed messages, e.g. if the last is cut."""
        special = tokenizer.special_ids
        ends = frozenset(special[end] for end in _ENDS)
        parts = list(_split(self.token_ids, ends))
        body = special[SpecialToken.MESSAGE]
        if not parts or len(parts) != len(self._kinds) or not all(body in part for part in parts):
            return None
        if parts[-1][-1] not in ends:  # ended by another stop token
            return None
        if parts[-1][-1] == special[SpecialToken.RETURN]:
            parts[-1][-1] = special[SpecialToken.END]  # as Harmony has it in a history
        messages = []
        for i, (kind, part) in enumerate(zip(self._kinds, parts, strict=True)):
            if kind is None:
                return None
            text = tokenizer.decode(part[part.index(body) + 1 :])
            messages.append(WrittenMessage(kind=kind, text=text, token_ids=part, is_first=i == 0))
        return WrittenTurn(messages=tuple(messages), call_names=tuple(self._call_names))


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A rendered prompt's tokens: how many are before the first answer, and how many are the assistant's, by
    source: `written` by the model, or `rendered` from text. `current_date` is the conversation's."""

    token_ids: list[int]
    num_opening_tokens: int = 0
    history: dict[str, int] = {}
    current_date: str | None = None


def encoded(segments: Iterable[Segment], tokenizer: ModelTokenizer, limit: int) -> Encoded:
    """The tokens of a rendered prompt. Raises TooManyTokens if there are more than `limit`."""
    token_ids: list[int] = []
    special_ids = tokenizer.special_ids
    num_opening = num_written = num_rendered = 0
    start = 0  # of the message
    is_author = is_assistant = False
    for segment in segments:
        if isinstance(segment, SpecialToken):
            if segment is SpecialToken.START:
                start = len(token_ids)
            token_ids.append(special_ids[segment])
            if is_assistant and segment in _ENDS:
                num_rendered += len(token_ids) - start
            is_author = segment is SpecialToken.START
            continue
        if isinstance(segment, str):
            if is_author:
                is_assistant = segment.startswith("assistant")
            token_ids += tokenizer.encode_text_segment(segment, limit)
        else:  # only answers are given as tokens
            is_assistant = True
            num_written += len(segment)
            if segment[0] == special_ids[SpecialToken.START]:
                start = len(token_ids)
            token_ids += segment
        if is_assistant and not num_opening:
            num_opening = start
        is_author = False
        if len(token_ids) > limit:
            raise TooManyTokens
    history = {"written": num_written, "rendered": num_rendered}
    return Encoded(token_ids=token_ids, num_opening_tokens=num_opening, history=history)


def _split(token_ids: Sequence[int], ends: frozenset[int]) -> Iterator["array[int]"]:
    """The messages, each with its end token; the last one may be cut."""
    start = 0
    for i, token_id in enumerate(token_ids):
        if token_id in ends:
            yield array("I", token_ids[start : i + 1])
            start = i + 1
    if start < len(token_ids):
        yield array("I", token_ids[start:])


def _is_same_call(call: ToolCall, written: str) -> bool:
    """Whether the arguments are the same text or JSON, which clients reformat, or the input of a custom tool
    that the model wrapped in JSON."""
    if call.arguments == written:
        return True
    try:
        value = msgspec.json.decode(written)
        if call.takes_text:
            return bool(value == {"input": call.arguments})
        # As text: to Python, 1, 1.0 and true are equal.
        return _json(value) == _json(msgspec.json.decode(call.arguments))
    except (msgspec.DecodeError, RecursionError):
        return False


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


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


def joined(parts: Iterable[Turn]) -> Iterator[Turn]:
    """The parts as turns: consecutive assistant parts are merged into one turn per answer, so that they are
    rendered as the model wrote them. Empty assistant parts are dropped."""
    turn = AssistantTurn()
    for part in _with_preambles(list(parts)):
        if part == AssistantTurn():
            continue
        if isinstance(part, AssistantTurn) and _follows(part, turn):
            turn = _both(turn, part)
            continue
        if turn != AssistantTurn():
            yield turn
        turn = part if isinstance(part, AssistantTurn) else AssistantTurn()
        if not isinstance(part, AssistantTurn):
            yield part
    if turn != AssistantTurn():
        yield turn


def _with_preambles(parts: list[Turn]) -> list[Turn]:
    """The parts. A text whose answer goes on with more text or reasoning, and then a call, is a preamble: it
    would be a final answer, and end the reasoning before it, if it were a turn without that call."""
    calls_follow = is_next = False
    for i, part in reversed(list(enumerate(parts))):
        if not isinstance(part, AssistantTurn) or part.preamble:
            calls_follow = False
        elif part.tool_calls:
            calls_follow = is_next = True
        else:
            if calls_follow and part.text and not is_next:
                parts[i] = AssistantTurn(preamble=part.text)
            is_next = False
    return parts


def _follows(new: AssistantTurn, turn: AssistantTurn) -> bool:
    """Whether `new` continues `turn`, whose order is reasoning, preambles, text, calls. Between preambles
    there may be more reasoning."""
    if new.tool_calls:
        return True
    if new.text or new.preamble or turn.preamble:
        return not (turn.text or turn.tool_calls)
    return turn == AssistantTurn()


def _both(turn: AssistantTurn, new: AssistantTurn) -> AssistantTurn:
    return AssistantTurn(
        reasoning=_paragraphs(turn.reasoning, new.reasoning),
        preamble=_paragraphs(turn.preamble, new.preamble),
        text=turn.text or new.text,
        tool_calls=turn.tool_calls + new.tool_calls,
    )


def _paragraphs(*texts: str | None) -> str | None:
    return PARAGRAPH.join(filter(None, texts)) or None
