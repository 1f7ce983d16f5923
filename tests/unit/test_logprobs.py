"""Log probabilities in the completions API's shape."""

from itertools import accumulate
from pathlib import Path

from baton.messages import TokenLogprob
from frontend.text.tokenizer import ModelTokenizer
from frontend.turn.logprobs import echoed_logprobs, legacy_logprobs

TOKENIZER = ModelTokenizer.load(Path(__file__).parents[2] / "models/demo")


def entries(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(i, -0.5, ((i, -0.5),)) for i in TOKENIZER.encode_text(text)]


def test_offsets_count_the_characters_of_the_tokens_before() -> None:
    made = legacy_logprobs(entries("Hello, wonderful world"), TOKENIZER, 7)
    lengths = [len(token) for token in made.tokens]
    assert max(lengths) > 1
    assert made.text_offset == list(accumulate(lengths[:-1], initial=7))


def test_an_echo_begins_with_a_token_without_a_probability() -> None:
    first, *rest = entries("Hello, wonderful world")
    made = echoed_logprobs(first.token_id, rest, TOKENIZER)
    assert made.token_logprobs == [None, *[-0.5] * len(rest)]
    assert made.text_offset[:2] == [0, len(made.tokens[0])]
    assert "".join(made.tokens) == "Hello, wonderful world"
