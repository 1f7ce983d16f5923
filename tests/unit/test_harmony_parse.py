"""The parser, case by case: tests/data/harmony_cases.yaml says what it makes of an answer."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from frontend.harmony.parse import (
    MAX_HEADER_BYTES,
    MAX_HEADER_BYTES_AFTER_CHANNEL,
    Delta,
    End,
    HarmonyParser,
    Text,
)
from frontend.text.tokenizer import SpecialToken, Vocabulary
from tests.repairs import REPAIRS, messages

CASES = yaml.safe_load((Path(__file__).parents[1] / "data" / "harmony_cases.yaml").read_text())
TOOLS = frozenset({"get_weather", "bash"})

# The toy vocabulary: a token for each byte, then the control tokens, then one that has no meaning.
RESERVED_ID = 256 + len(SpecialToken)
VOCABULARY = Vocabulary(
    special_ids={token: 256 + i for i, token in enumerate(SpecialToken)},
    token_bytes=[bytes([byte]) for byte in range(256)] + [b""] * (len(SpecialToken) + 1),
)
_CONTROL = re.compile(r"(<\|(?:byte:..|[a-z]+)\|>)")


def encode(text: str) -> list[int]:
    ids: list[int] = []
    for part in _CONTROL.split(text):
        if part.startswith("<|byte:"):
            ids.append(int(part[7:9], 16))
        elif part == "<|reserved|>":
            ids.append(RESERVED_ID)
        elif _CONTROL.fullmatch(part):
            ids.append(VOCABULARY.special_ids[SpecialToken(part)])
        else:
            ids += part.replace("⟨|", "<|").replace("|⟩", "|>").encode()
    return ids


def parser_of(case: dict[str, Any]) -> HarmonyParser:
    tools = frozenset(case.get("tools", TOOLS))
    return HarmonyParser(VOCABULARY, tools, may_call=case.get("may_call", True))


def parse(text: str) -> tuple[list[Delta], HarmonyParser]:
    parser = HarmonyParser(VOCABULARY, TOOLS)
    return parser.feed(encode(text)) + parser.finish(), parser


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "token by token"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_an_answer_becomes_its_messages(case: dict[str, Any], is_whole: bool) -> None:
    parser, ids = parser_of(case), encode(case["tokens"])
    chunks = [ids] if is_whole else [[token_id] for token_id in ids]
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)] + parser.finish()

    assert messages(deltas) == case["gives"]
    ends = [delta.complete for delta in deltas if isinstance(delta, End)]
    is_cut = case.get("cut", False)
    assert ends == [True] * (len(ends) - is_cut) + [False] * is_cut
    assert dict(parser.repairs) == case.get("repairs", {})


def test_every_kind_of_repair_has_a_case() -> None:
    assert {kind for case in CASES for kind in case.get("repairs", {})} == set(REPAIRS)


@pytest.mark.parametrize(
    "fed",
    [
        [("ab<|byte:C3|>", [("ab", 0, 3)]), ("<|byte:A9|>", [("é", 3, 4)]), ("<|byte:C3|>", []),
         ("<|byte:A9|><|return|>", [("é", 4, 6)])],
        [("a<|reserved|>", [("a", 0, 1)]), ("<|reserved|>", []), ("b", [("b", 1, 4)])],
    ],
)  # fmt: skip
def test_every_token_belongs_to_the_delta_that_it_completes(fed: list[tuple[str, list[Any]]]) -> None:
    parser = HarmonyParser(VOCABULARY, TOOLS)
    header = encode("<|channel|>final<|message|>")
    num = len(header)
    parser.feed(header)
    for text, deltas in fed:
        expected = [Text(said, num + start, num + stop) for said, start, stop in deltas]
        assert [delta for delta in parser.feed(encode(text)) if isinstance(delta, Text)] == expected


def test_reasoning_tokens_are_counted_without_headers_and_control_tokens() -> None:
    _, parser = parse(
        "<|channel|>analysis<|message|>12345<|end|><|start|>assistant<|channel|>analysis 678<|end|>"
        "<|start|>assistant<|channel|>final<|message|>answer<|return|>"
    )
    assert parser.num_reasoning_tokens == 8
    parser.feed(encode("<|start|>assistant<|channel|>analysis<|message|>9<|reserved|>"))
    assert parser.num_reasoning_tokens == 10, "a token without text counts, too"
    parser.feed(encode("<|end|><|start|>assistant<|channel|>final<|message|>more"))
    assert parser.num_reasoning_tokens == 10


@pytest.mark.parametrize(
    ("header", "limit", "kind"),
    [("", MAX_HEADER_BYTES, "text"), ("<|channel|>analysis ", MAX_HEADER_BYTES_AFTER_CHANNEL, "reasoning")],
)
def test_text_is_held_back_up_to_a_limit_when_its_message_token_is_missing(
    header: str, limit: int, kind: str
) -> None:
    parser = HarmonyParser(VOCABULARY, TOOLS)
    text = "We need words. " * 100
    fed = [parser.feed([token_id]) for token_id in encode(header + text)]
    held = next(i for i, deltas in enumerate(fed) if deltas)

    assert held == len(encode("<|channel|>" if header else "")) + limit + len("get_weather")
    deltas = [delta for each in fed for delta in each]
    assert messages(deltas + parser.finish()) == [{kind: text}]


@pytest.mark.parametrize(
    "garbled", ["commentary?", "commentary", " 2?", "<|channel|>commentary?", "<|channel|>"]
)
def test_a_garbled_header_without_end_says_nothing(garbled: str) -> None:
    parser = HarmonyParser(VOCABULARY, TOOLS)
    assert parser.feed(encode("<|channel|>commentary " + garbled * 200)) == []
    deltas = parser.feed(encode("<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>"))
    assert messages(deltas) == [{"text": "Hi"}]
    assert 1 < parser.repairs["malformed_header"] < 50  # it is dropped piece by piece


@pytest.mark.parametrize(
    ("num_chars", "header"),
    [
        (MAX_HEADER_BYTES_AFTER_CHANNEL, "<|channel|>commentary to={}"),
        (MAX_HEADER_BYTES, "to={}<|channel|>final"),
    ],
)
def test_a_header_may_be_longer_by_a_tools_name(num_chars: int, header: str) -> None:
    name = "a" * num_chars
    parser = HarmonyParser(VOCABULARY, frozenset({name, "b"}))
    deltas = parser.feed(encode(header.format(f"functions.{name}") + " json<|message|>{}<|call|>"))
    assert messages(deltas) == [{"call": name, "arguments": "{}"}]
    assert parser.repairs == {}


def test_blanks_before_a_channel_leave_room_for_the_rest_of_the_header() -> None:
    blanks = " " * (MAX_HEADER_BYTES_AFTER_CHANNEL + 50)
    deltas, parser = parse(blanks + "<|channel|>commentary to=functions.bash json<|message|>{}<|call|>")
    assert messages(deltas) == [{"call": "bash", "arguments": "{}"}]
    assert parser.repairs == {}
