"""A toy Harmony vocabulary, and the properties that the parser's output must have for every stream."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from baton.messages import FinishReason, GenerateRequest, Sampling, TokenChunk
from frontend.chat import MessageWriter
from frontend.harmony.parse import Begin, Delta, End, HarmonyParser, Text
from frontend.http.answer import Envelope
from frontend.text.tokenizer import ModelTokenizer, SpecialToken, Vocabulary
from frontend.turn.choice import Choice
from frontend.turn.fields import CommonFields
from tests.repairs import REPAIRS

TOOLS = frozenset({"get_weather", "bash", "search"})
HEADER_WORDS = (
    *("assistant", "user", "tool", "analysis", "commentary", "final", "comment", " json", " code", "=", " "),
    *(" to=functions.bash", " to=get_weather", " to=", " to=python", " to=bash", "to", "functions.", "bash"),
    *("search", "thoughts", "bashcommentary", "assistantfinal", "\n", "{", '"', "?", " ––", " to=assistant"),
)
TEXT = ("Hello", " there", ' {"a": 1}', "é日", "👍", "\ufeff", "<", "|", "\x00", "3")
SPELLED = ("<|end|>", "<|channel|>", "<|message|>", "<|start|>", "<|", "|>", "<|chan", "<|call|>")
BROKEN = (b"\xc3", b"\xe6\x97", b"\xa9", b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"a\xe6")
NUM_MARKS = 4096

# Each word, and each piece of a character, is one token. A mark is a word that no header uses and that
# appears at most once in a stream, so that a lost one can be named.
_WORDS = [word.encode() for word in (*HEADER_WORDS, *TEXT, *SPELLED)]
_ID_OF_WORD = {word.decode(): i for i, word in enumerate(_WORDS)}
MARK = len(_WORDS) + len(BROKEN)
_FIRST_SPECIAL = MARK + NUM_MARKS
_ID = {token: _FIRST_SPECIAL + i for i, token in enumerate(SpecialToken)}
VOCABULARY = Vocabulary(
    special_ids=_ID,
    token_bytes=[
        *(*_WORDS, *BROKEN),
        *(b" ~%d; " % i for i in range(NUM_MARKS)),
        *[b""] * (len(SpecialToken) + 1),  # the last one has no meaning
    ],
)
ANY_TOKEN = (-1, *range(MARK + 1), *range(_FIRST_SPECIAL, len(VOCABULARY.token_bytes) + 1))
_CONTROLS = {token_id for token, token_id in _ID.items() if token is not SpecialToken.STARTOFTEXT}
_ENDS = {_ID[SpecialToken(f"<|{name}|>")] for name in ("end", "call", "return", "endoftext")}
_ENDS_BODY = _ENDS | {_ID[SpecialToken.START], _ID[SpecialToken.CHANNEL]}
# After these a mark may be parsed as a role, a channel, a content type or a name.
_TAKES_A_WORD = {_ID[SpecialToken.START], _ID[SpecialToken.CHANNEL], _ID[SpecialToken.CONSTRAIN]} | {
    i for i, word in enumerate(_WORDS) if word.endswith((b"=", b"<|channel|>"))
}
# Without one of these, all messages are the assistant's.
_OTHER_NAMES = (b"user", b"tool", b"bash", b"search", b"functions.", b"to=", b" to=assistant")
_NAMES = frozenset(i for i, word in enumerate(_WORDS) if word.endswith(_OTHER_NAMES))
_SPELLED_IDS = frozenset(i for i, word in enumerate(_WORDS) if b"<" in word or b"|" in word)
_MARKS = re.compile(r"~(\d+);")  # the end keeps a number that follows apart

# A message needs a tokenizer only for log probabilities.
_TOKENIZER = cast("ModelTokenizer", SimpleNamespace(vocabulary=VOCABULARY))
_SAMPLING = Sampling(max_tokens=1, seed=0)
_REQUEST = GenerateRequest(request_id="r", model="m", token_ids=[], sampling=_SAMPLING, deadline_s=1)


class Message(msgspec.Struct, array_like=True):
    """A message assembled from its deltas; `start` and `stop` are token positions, 0 for calls."""

    kind: str
    text: str = ""
    name: str = ""
    start: int = 0
    stop: int = 0
    complete: bool = True


class Layout(msgspec.Struct):
    """The expected output of a stream. A body is the text between `<|message|>` and a token that can
    end it."""

    bodies: list[bytes]
    marks: list[int]
    ends_in_body: bool = False


def ids_of(*pieces: str) -> list[int]:
    """Ids of words and control tokens; `~` is a mark, a backslash makes a control token a word."""
    return [_id_of(piece) for piece in pieces]


def _id_of(piece: str) -> int:
    if piece == "~":
        return MARK
    if piece.startswith("<|"):
        return _ID[SpecialToken(piece)]
    return _ID_OF_WORD[piece.removeprefix("\\")]


def numbered(ids: Iterable[int]) -> list[int]:
    """The stream with unique marks."""
    num_marks = 0
    out = []
    for token_id in ids:
        is_mark = MARK <= token_id < _FIRST_SPECIAL
        out.append(MARK + num_marks if is_mark else token_id)
        num_marks += is_mark
    assert num_marks <= NUM_MARKS
    return out


def cuts(ids: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    """Pieces of these sizes, and the rest."""
    chunks, start = [], 0
    for size in sizes:
        chunks.append(ids[start : start + size])
        start += size
    return [*chunks, ids[start:]]


def check(ids: Sequence[int], sizes: Sequence[int]) -> None:
    """Parse a numbered stream whole, by token and in pieces; AssertionError if a property is violated."""
    messages, parser = _parse([ids])
    for chunks in ([[token_id] for token_id in ids], cuts(ids, sizes)):
        others, other = _parse(chunks)
        assert others == messages, f"not the same in pieces {chunks}: {others}, whole: {messages}"
        assert other.repairs == parser.repairs
        assert other.num_reasoning_tokens == parser.num_reasoning_tokens
    assert parser.repairs.keys() <= REPAIRS.keys()
    layout = _layout(ids)
    num_dropped = parser.repairs["foreign_author"]
    assert not num_dropped or not _NAMES.isdisjoint(ids), "only the assistant spoke"
    _check_text(ids, layout, messages, num_dropped)
    _check_ends(ids, layout, messages, num_dropped)


def check_without_calls(ids: Sequence[int]) -> None:
    """Without allowed calls, the output is the same, with arguments as reasoning and the calls counted."""
    messages, parser = _parse([ids])
    others, other = _parse([ids], may_call=False)
    expected = [
        ("reasoning" if message.kind == "call" else message.kind, message.text, message.complete)
        for message in messages
        if message.text
    ]
    assert [(message.kind, message.text, message.complete) for message in others] == expected
    num_calls = sum(message.kind == "call" for message in messages)
    assert other.repairs == parser.repairs + Counter(forbidden_call=num_calls)


def check_answer(ids: Sequence[int], sizes: Sequence[int], finish_reason: FinishReason) -> None:
    """A streamed chat answer and one gathered at once are the same message."""
    whole, writer = _message(stream=False)
    for deltas in _deltas([ids], whole, finish_reason):
        writer.write(deltas)
    body = writer.body()
    content, reasoning, finish = "", "", None
    calls: list[tuple[str, str]] = []
    streamed, writer = _message(stream=True)
    events = b"".join(map(writer.write, _deltas(cuts(ids, sizes), streamed, finish_reason))) + writer.end()
    for event in events.removesuffix(b"\n\n").split(b"\n\n"):
        chunk: Any = msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]
        content += chunk["delta"].get("content", "")
        reasoning += chunk["delta"].get("reasoning_content", "")
        finish = chunk["finish_reason"]
        for call in chunk["delta"].get("tool_calls", ()):
            if "name" in call["function"]:
                calls.append((call["function"]["name"], ""))
            else:
                name, arguments = calls[call["index"]]
                calls[call["index"]] = name, arguments + call["function"]["arguments"]
    expected = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    assert body.finish_reason == finish == expected
    message = body.message
    made = [call.function for call in message.tool_calls or () if call.function]
    gathered = [(call.name, call.arguments) for call in made]
    assert (content, reasoning, calls) == (message.content or "", message.reasoning_content or "", gathered)


def _message(*, stream: bool) -> tuple[Choice, MessageWriter]:
    choice = Choice(_REQUEST, HarmonyParser(VOCABULARY, TOOLS), _TOKENIZER)
    envelope = Envelope("chat.completion.chunk", "chatcmpl", "m", CommonFields(model="m", stream=stream))
    return choice, MessageWriter(0, choice, envelope)


def _deltas(
    chunks: Sequence[Sequence[int]], choice: Choice, finish_reason: FinishReason
) -> Iterator[Sequence[Delta]]:
    for chunk in chunks[:-1]:
        yield choice.feed(TokenChunk(tuple(chunk)))
    yield choice.feed(TokenChunk(tuple(chunks[-1]), finish_reason))
    yield choice.finish()


def _parse(chunks: Iterable[Sequence[int]], *, may_call: bool = True) -> tuple[list[Message], HarmonyParser]:
    parser = HarmonyParser(VOCABULARY, TOOLS, may_call=may_call)
    messages: list[Message] = []
    is_open = False
    for chunk in chunks:
        is_open = _gather(parser.feed(chunk), messages, is_open=is_open)
    is_open = _gather(parser.finish(), messages, is_open=is_open)
    assert not is_open, "a message without an end"
    return messages, parser


def _gather(deltas: Sequence[Delta], messages: list[Message], *, is_open: bool) -> bool:
    """Assemble deltas into messages, which must be whole, in order and not empty, except calls."""
    for delta in deltas:
        match delta:
            case End(complete):
                assert is_open, "an end without a message"
                assert messages[-1].text or messages[-1].kind == "call", "a message without text"
                messages[-1].complete = complete
                is_open = False
            case Begin(kind, name, index):
                assert not is_open, "a message inside a message"
                messages.append(Message("reasoning" if kind == "thought" else kind, name=name))
                if kind == "call":
                    assert index == sum(message.kind == "call" for message in messages) - 1
                is_open = True
            case Text(text):
                assert text, "an empty delta"
                assert is_open, "a text outside of a message"
                _append(delta, messages)
    return is_open


def _append(delta: Text, messages: list[Message]) -> None:
    message = messages[-1]
    if message.kind != "call":
        before = max((earlier.stop for earlier in messages[-2:]), default=0)
        assert before <= delta.start <= delta.stop, "a token in two deltas"
        message.start = message.start if message.text else delta.start
        message.stop = delta.stop
    message.text += delta.text


def _layout(ids: Sequence[int]) -> Layout:
    layout = Layout([], [])
    size = len(VOCABULARY.token_bytes)
    in_body = False
    before = -1
    for token_id in ids:
        if token_id in _ENDS_BODY:
            in_body = False
        elif token_id == _ID[SpecialToken.MESSAGE] and not in_body:
            in_body = True
            layout.bodies.append(b"")
            if before >= MARK and layout.marks[-1:] == [before]:
                layout.marks.pop()  # may be a content type
        elif MARK <= token_id < _FIRST_SPECIAL and (in_body or before not in _TAKES_A_WORD):
            layout.marks.append(token_id)
        data = VOCABULARY.token_bytes[token_id] if 0 <= token_id < size else b""
        if in_body:
            layout.bodies[-1] += data
        if data.strip() or token_id in _CONTROLS:
            before = token_id
    layout.ends_in_body = in_body
    return layout


def _check_text(ids: Sequence[int], layout: Layout, messages: list[Message], num_dropped: int) -> None:
    """Bodies and marks appear once and in order, except `num_dropped` foreign messages; no text looks like a
    control token unless it was written as text."""
    text_shown = "\n".join(message.text for message in messages)
    at = num_lost = 0
    for body in layout.bodies:
        text = body.decode(errors="replace")
        if num_dropped and not _MARKS.search(text):
            continue  # the dropped text may also be elsewhere
        found = text_shown.find(text, at)
        num_lost += found < 0
        assert num_lost <= num_dropped, f"{text!r} is not in {text_shown[at:]!r}"
        at = at if found < 0 else found + len(text)
    marks = [MARK + int(mark) for mark in _MARKS.findall(text_shown)]
    assert num_dropped or set(layout.marks) <= set(marks), "a mark is lost"
    assert marks == sorted(set(marks)), "a mark is doubled, or out of order"
    shown = [text_shown] if _SPELLED_IDS.isdisjoint(ids) else []
    for text in (*shown, *(message.name for message in messages)):
        assert "<|" not in text, "a control token is shown"
    assert all(message.name for message in messages if message.kind == "call"), "a call without a name"


def _check_ends(ids: Sequence[int], layout: Layout, messages: list[Message], num_dropped: int) -> None:
    """Only the last message can be cut: where the stream ends in its text, without an end token."""
    assert all(message.complete for message in messages[:-1])
    ends_in_body = layout.ends_in_body and layout.bodies[-1]
    if not num_dropped and (ends_in_body or (layout.marks and layout.marks[-1] == ids[-1])):
        assert not messages[-1].complete, "a cut message counts as complete"
    if ids and ids[-1] in _ENDS and messages:
        assert messages[-1].complete, "a complete message counts as cut"
