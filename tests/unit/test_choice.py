"""One choice, parsed or raw: the same however its tokens are split, up to where it is stopped."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import replace

from baton.messages import FinishReason, GenerateRequest, Sampling, TokenChunk, TokenLogprob, Usage
from frontend.harmony.parse import Begin, Delta, End, HarmonyParser, Text
from frontend.turn.choice import Choice, RawText
from tests.repairs import messages
from tests.scripted_frontend import TOKENIZER
from tests.scripted_workers import request

THINK = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'
ANSWER = THINK + "<|channel|>final<|message|>Hello, world. And more.<|return|>"
TWO_CALLS = THINK + CALL + "<|start|>assistant" + CALL


def sampled(**fields: Any) -> GenerateRequest:
    return replace(request(), sampling=Sampling(max_tokens=99, seed=0, **fields))


def choice_of(*stop_strings: str, max_calls: int | None = None) -> Choice:
    reader = HarmonyParser(TOKENIZER.vocabulary, frozenset({"functions.f", "f"}), may_call=True)
    return Choice(request(), reader, TOKENIZER, stop_strings=stop_strings, max_calls=max_calls)


def fed(choice: Choice, text: str, tokens_per_chunk: int) -> list[Delta]:
    """All deltas of a text up to a stop."""
    token_ids = iter(TOKENIZER.encode_text(text, allow_special=True))
    deltas: list[Delta] = []
    while not choice.stopped and (ids := tuple(islice(token_ids, tokens_per_chunk))):
        deltas += choice.feed(TokenChunk(ids))
    return [*deltas, *choice.finish()]


def shown(deltas: Sequence[Delta]) -> tuple[str, str, str]:
    """(text, reasoning, calls)."""
    found = messages(deltas)
    text = "".join(each.get("text", "") + each.get("preamble", "") for each in found)
    thought = "".join(each.get("reasoning", "") for each in found)
    calls = "".join(f" {each['call']}:{each['arguments']}" for each in found if "call" in each)
    return text, thought, calls


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANSWER, ("Hello, world. And more.", "Let me think.", "")),
        (TWO_CALLS, ("", "Let me think.", ' f:{"x": 1} f:{"x": 1}')),
    ],
)
def test_an_answer_is_whole_in_its_deltas_and_as_written(
    text: str, expected: tuple[str, str, str], tokens_per_chunk: int
) -> None:
    choice = choice_of()
    deltas = fed(choice, text, tokens_per_chunk)
    assert shown(deltas) == expected
    assert [d.call_id for d in deltas if isinstance(d, Begin) and d.kind == "call"] == choice.call_ids
    assert len(set(choice.call_ids)) == len(choice.call_ids) == expected[2].count("f:")
    said = [each.text for each in choice.written() if each.kind != "call"]
    assert said == [text for text in (expected[1], expected[0]) if text]


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("stop", "expected", "met"),
    [
        (", w", "Hello", ", w"),
        ("more.X", "Hello, world. And more.", None),  # its beginning is held back until the end
        ("think", "Hello, world. And more.", None),  # reasoning is not text
    ],
)
def test_a_stop_string_ends_the_text_only(
    stop: str, expected: str, met: str | None, tokens_per_chunk: int
) -> None:
    choice = choice_of(stop)
    assert shown(fed(choice, ANSWER, tokens_per_chunk))[:2] == (expected, "Let me think.")
    assert choice.stop_string == met
    assert choice.stopped == (met is not None)


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 1000])
@pytest.mark.parametrize(("stop", "said"), [("stop", ["One st", "op it."]), ("e s", ["On"])])
def test_a_stop_string_is_in_one_message_which_may_be_a_preamble(
    stop: str, said: list[str], tokens_per_chunk: int
) -> None:
    text = "<|channel|>commentary<|message|>One st<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>op it.<|return|>"
    found = messages(fed(choice_of(stop), text, tokens_per_chunk))
    assert [part for each in found for part in each.values()] == said


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 3, 1000])
def test_tokens_after_a_stop_string_do_not_count(tokens_per_chunk: int) -> None:
    choice, token_ids = choice_of(", w"), iter(TOKENIZER.encode_text(ANSWER, allow_special=True))
    while not choice.stopped:
        choice.feed(TokenChunk(tuple(islice(token_ids, tokens_per_chunk)), usage=Usage(9, 5, 1)))
    up_to_it = ANSWER[: ANSWER.index(", w") + len(", w")]
    assert choice.num_tokens == len(TOKENIZER.encode_text(up_to_it, allow_special=True))
    assert choice.num_cached_tokens == 5


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 7, 1000])
def test_an_answer_ends_after_its_last_allowed_call(tokens_per_chunk: int) -> None:
    choice = choice_of(max_calls=1)
    more = "<|start|>assistant<|channel|>final<|message|>Hello"
    deltas = fed(choice, TWO_CALLS + more, tokens_per_chunk)
    assert shown(deltas) == ("", "Let me think.", ' f:{"x": 1}')
    assert [type(each) for each in deltas].count(End) == 2
    assert choice.stopped
    assert len(choice.call_ids) == 1
    assert [(each.kind, each.text) for each in choice.written()] == [("thought", "Let me think.")]


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 1000])
@pytest.mark.parametrize("stops", [(), ("lo?", "nd!", "e.X")])  # parts of tokens are held back
def test_each_token_of_the_text_has_its_log_probability_once(
    stops: tuple[str, ...], tokens_per_chunk: int
) -> None:
    choice = Choice(sampled(logprobs=0), RawText(TOKENIZER), TOKENIZER, stop_strings=stops)
    ids = iter(TOKENIZER.encode_text("Hello and möre."))
    deltas: list[Delta] = []
    while part := tuple(islice(ids, tokens_per_chunk)):
        deltas += choice.feed(TokenChunk(part, logprobs=tuple(TokenLogprob(i, -0.5, ()) for i in part)))
    deltas += choice.finish()
    parts = [choice.logprobs_of(delta) for delta in deltas if isinstance(delta, Text)]
    assert [one for part in parts for one in part or ()] == choice.logprobs


A, U1, U2 = TOKENIZER.encode_text("aü")


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([[A, U1, U2]], [("aü", 0, 3)]),
        ([[A], [U1], [U2, A]], [("a", 0, 1), ("üa", 1, 4)]),
        ([[A, U1], [U2]], [("a", 0, 2), ("ü", 2, 3)]),
        ([[A, U1]], [("a", 0, 2), ("\ufffd", 2, 2)]),
    ],
)
def test_each_token_is_in_the_piece_that_it_completes(
    chunks: Sequence[list[int]], said: list[tuple[str, int, int]]
) -> None:
    reader = RawText(TOKENIZER)
    deltas: list[Delta] = []
    for chunk in chunks:
        deltas += reader.feed(chunk)
    deltas += reader.finish()
    assert deltas == [Text(*each) for each in said]


@pytest.mark.parametrize(("reason", "text"), [("stop", "a"), ("length", "ab"), (None, "ab")])
def test_only_the_final_stop_token_is_left_out_of_the_text(reason: FinishReason | None, text: str) -> None:
    a, b = TOKENIZER.encode_text("ab")
    choice = Choice(request(), RawText(TOKENIZER), TOKENIZER, cut_ids=(b,))
    assert choice.feed(TokenChunk((a, b), reason)) == [Text(text, 0, len(text))]
    assert choice.num_tokens == 2
