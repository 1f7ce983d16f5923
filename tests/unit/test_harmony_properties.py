"""What holds of the parser for every sequence of tokens. BATON_FUZZ_EXAMPLES=1000000 looks further."""

import itertools
import os
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.detokenize import IncrementalDecoder, StopStrings
from frontend.harmony.deltas import (
    Delta,
    MessageEnd,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.repairs import REPAIRS
from frontend.harmony.specials import SpecialToken
from frontend.harmony.vocabulary import Vocabulary

FUZZ = settings(
    max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TOOLS = frozenset({"get_weather", "bash", "search"})
WORDS = [
    *("assistant", "user", "tool", " to=functions.bash", " to=get_weather", " to=", " to=python", " to=bash"),
    *("analysis", "commentary", "final", "comment", " json", " code", "functions.", "bash", "search", " "),
    *(
        "Hello",
        " there",
        ' {"a": 1}',
        "é日",
        "👍",
        "\n",
        "{",
        "<",
        "|",
        "<|end|>",
        "<|channel|>",
        "<|",
        "\x00",
    ),
]
BROKEN = [b"\xc3", b"\xe6\x97", b"\xa9", b"\xff", b"\xf0\x9f", b"\xed\xa0\x80", b"a\xe6"]

# Each word, and each piece of a character, is one token; the control tokens follow, and one without meaning.
_BYTES = [word.encode() for word in WORDS] + BROKEN
VOCABULARY = Vocabulary(
    special_ids={token: len(_BYTES) + i for i, token in enumerate(SpecialToken)},
    token_bytes=[*_BYTES, *[b""] * (len(SpecialToken) + 1)],
)
ID_OF = {word: i for i, word in enumerate(WORDS)} | {
    token.value: token_id for token, token_id in VOCABULARY.special_ids.items()
}
ENDS_BODY = {
    VOCABULARY.special_ids[token]
    for token in (
        SpecialToken.START,
        SpecialToken.CHANNEL,
        SpecialToken.END,
        SpecialToken.CALL,
        SpecialToken.RETURN,
        SpecialToken.ENDOFTEXT,
    )
}


def ids_of(*pieces: str) -> list[int]:
    """A backslash before the name of a control token makes it the word that is spelled like it."""
    return [WORDS.index(piece[1:]) if piece.startswith("\\") else ID_OF[piece] for piece in pieces]


WELL_FORMED = [
    ids_of("<|channel|>", "analysis", "<|message|>", "Hello", " there", "<|end|>", "<|start|>", "assistant"),
    ids_of("<|channel|>", "final", "<|message|>", "é日", "👍", "\\<|end|>", "<|return|>"),
    ids_of("<|channel|>", "commentary", " to=functions.bash", " ", "<|constrain|>", " json", "<|message|>"),
    ids_of(
        "{", ' {"a": 1}', "<|call|>", "<|start|>", "assistant", " to=get_weather", "<|channel|>", "analysis"
    ),
    ids_of("<|message|>", ' {"a": 1}', "<|call|>"),
    ids_of("<|channel|>", "commentary", "<|message|>", "Hello", "<|end|>", "<|start|>", "assistant"),
]

any_token = st.integers(min_value=-2, max_value=len(VOCABULARY.token_bytes) + 2)
random_streams = st.lists(any_token, max_size=60)


@st.composite
def mutated_streams(draw: st.DrawFn) -> list[int]:
    """Well-formed pieces in any order, with tokens deleted, doubled, replaced and put in."""
    ids = list(itertools.chain.from_iterable(draw(st.lists(st.sampled_from(WELL_FORMED), max_size=6))))
    for _ in range(draw(st.integers(0, 4))):
        if not ids:
            break
        at = draw(st.integers(0, len(ids) - 1))
        put = draw(
            st.one_of(st.just([]), st.just([ids[at]] * 2), st.lists(any_token, min_size=1, max_size=2))
        )
        ids[at : at + 1] = put
    return ids


streams = st.one_of(random_streams, mutated_streams())


def cuts(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(list(ids[start : start + size]))
        start += size
    return [*chunks, list(ids[start:])]


def parse(chunks: Sequence[Sequence[int]]) -> tuple[list[Delta], HarmonyParser]:
    parser = HarmonyParser(VOCABULARY, TOOLS)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return deltas + parser.finish(), parser


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        match delta, last:
            case ReasoningDelta(), ReasoningDelta():
                out[-1] = ReasoningDelta(last.text + delta.text, last.start, delta.stop)
            case TextDelta(), TextDelta():
                out[-1] = TextDelta(last.text + delta.text, last.start, delta.stop, delta.preamble)
            case ToolCallArguments(), ToolCallArguments():
                out[-1] = ToolCallArguments(delta.index, last.text + delta.text)
            case _:
                out.append(delta)
    return out


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(
        delta.text for delta in deltas if isinstance(delta, ReasoningDelta | TextDelta | ToolCallArguments)
    )


@FUZZ
@given(streams, st.lists(st.integers(0, 7), max_size=20))
def test_the_result_does_not_depend_on_how_tokens_were_split(ids: list[int], sizes: list[int]) -> None:
    whole, parser = parse([ids])
    assert set(parser.repairs) <= set(REPAIRS)
    for chunks in (cuts(ids, sizes), cuts(ids, [1] * len(ids))):
        deltas, other = parse(chunks)
        assert merged(deltas) == merged(whole)
        assert other.repairs == parser.repairs
        assert other.num_reasoning_tokens == parser.num_reasoning_tokens


@FUZZ
@given(streams, st.integers(1, 5))
def test_deltas_are_whole_messages_in_order(ids: list[int], size: int) -> None:
    deltas, _ = parse(cuts(ids, [size] * len(ids)))
    num_calls, position, kind = 0, 0, None
    for delta in deltas:
        match delta:
            case MessageEnd():
                assert kind is not None, "an end without a message"
                kind = None
                continue
            case ToolCallStart(index=index, name=name):
                assert kind is None
                assert index == num_calls
                assert name
                assert "<|" not in name
                num_calls += 1
                kind = "call"
                continue
            case ToolCallArguments(index=index):
                assert kind == "call"
                assert index == num_calls - 1
            case ReasoningDelta(start=start, stop=stop) | TextDelta(start=start, stop=stop):
                assert position <= start <= stop <= len(ids)
                position = stop
                now = "reasoning" if isinstance(delta, ReasoningDelta) else f"text {delta.preamble}"
                assert kind in (None, now)
                kind = now
        assert delta.text
    assert kind is None, "a message without an end"
    assert all(end.complete for end in deltas[:-1] if isinstance(end, MessageEnd))


@FUZZ
@given(streams)
def test_no_text_of_a_body_is_lost(ids: list[int]) -> None:
    """A body is what stands between `<|message|>` and the next control token that can end it."""
    deltas, _ = parse([ids])
    said = text_of(deltas)
    at = 0
    for body in bodies(ids):
        found = said.find(body, at)
        assert found >= 0, f"{body!r} is not in {said[at:]!r}"
        at = found + len(body)


def bodies(ids: Sequence[int]) -> list[str]:
    found: list[bytes] = []
    is_open = False
    for token_id in ids:
        if token_id in ENDS_BODY:
            is_open = False
        elif token_id == VOCABULARY.special_ids[SpecialToken.MESSAGE] and not is_open:
            is_open = True
            found.append(b"")
        elif is_open and 0 <= token_id < len(VOCABULARY.token_bytes):
            found[-1] += VOCABULARY.token_bytes[token_id]
    return [body.decode(errors="replace") for body in found]


FRAGMENTS = [
    *(
        ("Hello",),
        (" there",),
        ("é日",),
        ("👍",),
        ("<|end|>",),
        ("<|return|>",),
        ("<|start|>", "assistant", " "),
    ),
    *(("<|channel|>", "final", " "), ("<|channel|>", "analysis", " ")),
]


@FUZZ
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40))
def test_no_text_is_lost_where_no_message_token_ever_comes(fragments: list[tuple[str, ...]]) -> None:
    deltas, _ = parse([ids_of(*itertools.chain.from_iterable(fragments))])
    ordinary = "".join(fragment[0] for fragment in fragments if not fragment[0].startswith("<|"))
    assert "".join(text_of(deltas).split()) == "".join(ordinary.split())


@FUZZ
@given(streams)
def test_no_control_token_is_ever_shown(ids: list[int]) -> None:
    spelled = {WORDS.index(word) for word in WORDS if "<" in word or "|" in word}
    deltas, _ = parse([[token_id for token_id in ids if token_id not in spelled]])
    assert "<|" not in text_of(deltas)


@FUZZ
@given(st.binary(max_size=60), st.lists(st.integers(0, 5), max_size=20))
def test_bytes_decode_the_same_however_they_are_split(data: bytes, sizes: list[int]) -> None:
    decoder = IncrementalDecoder()
    text = "".join(decoder.push(bytes(chunk)) for chunk in cuts(list(data), sizes))
    assert text + decoder.flush() == data.decode(errors="replace")


@FUZZ
@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", max_size=4), max_size=3),
    st.lists(st.integers(0, 5), max_size=20),
)
def test_stop_strings_cut_at_the_one_that_is_complete_first(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    expected, is_expected = text, False
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            expected, is_expected = text[: end - max(map(len, ending))], True
            break

    machine = StopStrings(stops)
    start, sent, is_stopped = 0, "", False
    for size in [*sizes, len(text)]:
        out, is_stopped = machine.push(text[start : start + size])
        sent += out
        assert expected.startswith(sent)
        start += size
    assert sent + machine.flush() == expected
    assert is_stopped == is_expected
