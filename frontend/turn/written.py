"""Records answers as the model wrote them, so that later prompts repeat the exact tokens."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from frontend.harmony.conversation import AssistantTurn, Kind, ToolCall, WrittenMessage
from frontend.harmony.deltas import Delta, MessageEnd, ReasoningDelta, TextDelta, ToolCallStart
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
    num_opening = 0
    nums = {"written": 0, "rendered": 0}
    start = 0  # of the message
    author: Segment = ""
    start_id = tokenizer.special_ids[SpecialToken.START]
    for previous, segment in pairwise(("", *segments)):
        if segment is SpecialToken.START or (isinstance(segment, array) and segment[0] == start_id):
            start = len(token_ids)
        if previous is SpecialToken.START or isinstance(segment, array):
            author = segment
            if not num_opening and _is_assistant(author):
                num_opening = start
        token_ids += tokenizer.encode_segment(segment, limit)
        if len(token_ids) > limit:
            raise TooManyTokens
        if isinstance(segment, array):
            nums["written"] += len(segment)
        elif segment in _ENDS and _is_assistant(author):
            nums["rendered"] += len(token_ids) - start
    return Encoded(token_ids=token_ids, num_opening_tokens=num_opening, history=nums)


def _is_assistant(author: Segment) -> bool:
    """Whether what begins a message makes it the assistant's: only answers are given as tokens."""
    return isinstance(author, array) or (isinstance(author, str) and author.startswith("assistant"))


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
