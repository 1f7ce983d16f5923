"""Reasoning between turns: kept as the model wrote it, for clients that do not send it back; or sealed."""

import hashlib
import hmac
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AssistantTurn,
    Conversation,
    Kind,
    ToolCall,
    ToolResult,
    Turn,
    WrittenMessage,
)
from frontend.harmony.parse import ReadMessage
from frontend.text.tokenizer import ModelTokenizer, SpecialToken

# Separates two Harmony messages of one kind, such as a preamble and the answer.
PARAGRAPH = "\n\n"


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """An answer with calls: its API key, the id of its first call, its messages or only its reasoning, and
    its prompt's date."""

    owner: str
    call_id: str
    messages: tuple[WrittenMessage, ...]
    current_date: str | None = None

    def text_of(self, kind: Kind) -> str:
        """The text of all messages of a kind, as the chat API joins it."""
        return paragraphs(message.text for message in self.messages if message.kind == kind) or ""

    @property
    def num_bytes(self) -> int:
        """Memory of an entry of `Thoughts`, with up to 4 bytes a character."""
        sizes = (4 * (len(part.text) + len(part.token_ids)) for part in self.messages)
        return sum(sizes, _OBJECT_BYTES * (2 + len(self.messages)))

    def matches(self, turn: AssistantTurn) -> bool:
        """Whether a turn of the history has the same content. Clients may omit the reasoning."""
        calls = [message for message in self.messages if message.kind == "call"]
        return (
            turn.reasoning in {None, "", self.text_of("thought")}
            and (turn.text or "") == self.text_of("text")
            and len(calls) == len(turn.tool_calls)
            and all(map(_is_same_call, turn.tool_calls, calls))
        )


def written_messages(
    token_ids: Sequence[int], read: Sequence[ReadMessage], tokenizer: ModelTokenizer
) -> tuple[WrittenMessage, ...]:
    """The messages `read` of an answer; none if it has other tokens, as of a cut message."""
    special = tokenizer.special_ids
    if not read or read[-1].stop != len(token_ids):
        return ()
    messages = []
    start = 0
    for message in read:
        part = array("I", token_ids[start : message.stop])
        if start and part[0] != special[SpecialToken.START]:
            return ()
        if part[-1] == special[SpecialToken.RETURN]:
            part[-1] = special[SpecialToken.END]  # as Harmony has it in a history
        text = tokenizer.decode(part[message.start - start :])
        messages.append(WrittenMessage(kind=message.kind, text=text, token_ids=part, call=message.call or ""))
        start = message.stop
    return tuple(messages)


def _is_same_call(call: ToolCall, written: WrittenMessage) -> bool:
    """Whether the tool is the same, and the arguments are the same text or JSON, which clients reformat, or
    the input of a custom tool that the model wrapped in JSON, or the Messages API made an object."""
    is_same_tool = call.called == written.call.removeprefix("functions.")
    if not is_same_tool or call.arguments == written.text:
        return is_same_tool
    try:
        value = msgspec.json.decode(written.text or "{}")
        if call.takes_text:
            return bool(value == {"input": call.arguments})
        # As text: to Python, 1, 1.0 and true are equal.
        return _json(value) == _json(msgspec.json.decode(call.arguments))
    except (msgspec.DecodeError, RecursionError):
        return call.arguments == _json({"arguments": written.text}).decode()


def _json(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


MAX_BYTES = 64 << 20
# Of a message's objects. An entry's key, list node and objects have twice as many.
_OBJECT_BYTES = 300


class Thoughts:
    """An in-memory LRU cache, bounded in bytes. Ids cannot be guessed; `owner` separates API keys all
    the same. `share` is called with each entry that this process adds. Thread-safe."""

    def __init__(self, share: Callable[[Kept], object] = lambda _: None) -> None:
        self.num_bytes = 0
        self._share = share
        self._by_id: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, kept: Kept) -> None:
        """Add an entry, unless it is too large, and share it."""
        if kept.messages and kept.num_bytes <= MAX_BYTES // 8:
            self.take(kept)
            self._share(kept)

    def take(self, kept: Kept) -> None:
        """Add an entry that another process shares."""
        key = kept.owner, kept.call_id
        with self._lock:
            self._drop(key)
            self._by_id[key] = kept
            self.num_bytes += kept.num_bytes
            while self.num_bytes > MAX_BYTES:
                self._drop(next(iter(self._by_id)))

    def recall(self, owner: str, call_id: str) -> Kept | None:
        """The answer with that call, if it is kept."""
        key = owner, call_id.partition("-")[0]  # the first call's, see `Choice`
        with self._lock:
            if (kept := self._by_id.get(key)) is not None:
                self._by_id.move_to_end(key)
            return kept

    def resumed(self, owner: str, conversation: Conversation, today: str) -> Conversation:
        """The conversation with the original tokens of answers with calls that came back unchanged, and the
        missing reasoning of others, once. It keeps the date on which it began, so that midnight does not
        change its prompt: that of its last answer with calls if this is known here, else `today`."""
        turns: list[Turn] = []
        date, shown = None, set()  # ids of answers
        for turn in conversation.turns:
            if isinstance(turn, AssistantTurn) and turn.tool_calls:
                found = (self.recall(owner, call.call_id) for call in turn.tool_calls)
                known, date = next(filter(None, found), None), None
                if known is not None and known.matches(turn):
                    date = known.current_date
                    turn = replace(turn, written=known.messages)  # noqa: PLW2901  the completed one
                elif known is not None and not turn.reasoning and known.call_id not in shown:
                    turn = one_answer([AssistantTurn(reasoning=known.text_of("thought")), turn])  # noqa: PLW2901  as above
                shown.add(known and known.call_id)
            turns.append(turn)
        return replace(conversation, turns=tuple(turns), current_date=date or today)

    def _drop(self, key: tuple[str, str]) -> None:
        dropped = self._by_id.pop(key, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes


def joined(parts: Iterable[Turn]) -> Iterator[Turn]:
    """The parts as turns: consecutive assistant parts are merged into one turn per answer, so that they are
    rendered as the model wrote them. Empty assistant parts are dropped."""
    run: list[AssistantTurn] = []
    for part in (*parts, None):
        if isinstance(part, AssistantTurn):
            run += [part] if part != AssistantTurn() else []
            continue
        yield from _answers(run, has_results=isinstance(part, ToolResult))
        run.clear()
        if part is not None:
            yield part


def _answers(parts: Sequence[AssistantTurn], *, has_results: bool) -> Iterator[AssistantTurn]:
    """One turn per answer, which ends with its calls or, after the last call, with its text. What follows the
    last call belongs to its answer if results come next: the client has not taken it as the end."""
    ids = [part.tool_calls[0].call_id.partition("-")[0] for part in parts if part.tool_calls]
    key: str | int = ids[-1] if ids and has_results else len(parts)
    keys = []
    for i in reversed(range(len(parts))):
        if parts[i].tool_calls:
            key = ids.pop()
        elif parts[i].text and isinstance(key, int):
            key = i
        keys.append(key)
    for _, group in groupby(parts, lambda _: keys.pop()):
        yield one_answer(group)


def one_answer(joined_parts: Iterable[AssistantTurn]) -> AssistantTurn:
    """The parts of an answer as a turn. What comes after its last call was written before its calls."""
    parts = [inner for part in joined_parts for inner in part.parts or (part,)]
    if parts and not parts[-1].tool_calls:
        parts.sort(key=lambda part: bool(part.tool_calls))
    return AssistantTurn(
        reasoning=paragraphs(part.reasoning for part in parts),
        text=paragraphs(part.text for part in parts),
        is_preamble=bool(parts) and parts[-1].is_preamble,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def paragraphs(texts: Iterable[str | None]) -> str | None:
    """The texts that are not empty as one; None if all are."""
    return PARAGRAPH.join(filter(None, texts)) or None


_SEALED = "bt2 "  # earlier releases take such a text for another server's


class Seal:
    """Signs with a key shared by all frontends of a service, or with a random key of this process. Content of
    another key or server is left out rather than refused, since sessions move between servers."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        # Format version and a fingerprint of the key, before the MAC.
        self._prefix = f"bt1.{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}."

    def sign(self, text: str) -> str:
        mac = hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
        return self._prefix + mac[:32]

    def is_ours(self, text: str, signature: str, path: str) -> bool:
        """Whether the signature is of this key. Raises InvalidRequest, naming the field `path`, if it does
        not match the text."""
        if not signature.startswith(self._prefix):
            return False
        if not hmac.compare_digest(signature.encode(), self.sign(text).encode()):  # as texts only ASCII
            what = "does not match the reasoning; send both back unchanged, or leave them out."
            raise InvalidRequest.at(path, what)
        return True

    def close(self, text: str) -> str:
        """The text and its signature as one string, which `open` reads."""
        return f"{_SEALED}{self.sign(text)} {text}"

    def open(self, sealed: str, path: str) -> str | None:
        """The text of the field `path`, or None if this key did not seal it. Raises InvalidRequest."""
        signature, space, text = sealed.removeprefix(_SEALED).partition(" ")
        return text if space and self.is_ours(text, signature, path) else None
