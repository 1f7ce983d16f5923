"""Raw completions: which tokens are in which piece of text, and what is counted of an answer's tokens."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from baton.messages import FinishReason, Sampling, TokenChunk, TokenLogprob, Usage
from frontend.harmony.conversation import Delta, TextDelta
from frontend.harmony.parse import HarmonyParser
from frontend.http.chunks import UsageBody
from frontend.turn.choice import Choice, RawText
from tests.scripted_frontend import TOKENIZER
from tests.scripted_workers import request

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
    assert deltas == [TextDelta(*each) for each in said]


@pytest.mark.parametrize(("reason", "text"), [("stop", "a"), ("length", "ab"), (None, "ab")])
def test_only_the_token_that_stops_an_answer_is_no_text_but_it_counts(
    reason: FinishReason | None, text: str
) -> None:
    a, b = TOKENIZER.encode_text("ab")
    choice = Choice(request(), RawText(TOKENIZER), cut_ids=(b,))
    assert choice.feed(TokenChunk((a, b), reason)) == [TextDelta(text, 0, len(text))]
    assert choice.num_tokens == 2


def test_what_workers_tell_of_an_answer_is_kept_to_its_end() -> None:
    asked = replace(request(), sampling=Sampling(max_tokens=9, seed=0, logprobs=0, prompt_logprobs=0))
    choice = Choice(asked, RawText(TOKENIZER))
    scored = [TokenLogprob(i, -0.5, ()) for i in range(4)]
    choice.feed(TokenChunk((0, 1), logprobs=tuple(scored[:2])))
    choice.feed(
        TokenChunk((2,), "length", Usage(5, 3, 3), logprobs=(scored[2],), prompt_logprobs=(scored[3],))
    )
    assert choice.logprobs == scored[:3]
    assert choice.prompt_logprobs == (scored[3],)
    assert (choice.num_tokens, choice.num_cached_tokens, choice.finish_reason) == (3, 3, "length")


def test_the_usage_of_several_choices_counts_their_prompt_once() -> None:
    choices = []
    for number in range(2):
        asked = replace(request(), sampling=Sampling(max_tokens=4, seed=0, choice=number))
        choice = Choice(asked, HarmonyParser(TOKENIZER.vocabulary, frozenset()))
        ids = TOKENIZER.encode_text("<|channel|>analysis<|message|>abc<|end|>", allow_special=True)
        choice.feed(TokenChunk(tuple(ids), "stop", Usage(2, 1, len(ids))))
        choices.append(choice)
    usage = UsageBody.of(choices)
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 2 * len(ids))
    assert usage.total_tokens == 2 + 2 * len(ids)
    assert usage.prompt_tokens_details.cached_tokens == 1
    num_reasoning = choices[0].num_reasoning_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 2 * num_reasoning > 0
