"""Text in pieces: nothing is lost, and its tokens are those of the whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.pieces import PIECE_CHARS, pieces
from frontend.text.tokenizer import ModelTokenizer, TooManyTokens
from tests.scripted_frontend import TOKENIZER

TEXT = st.one_of(st.text(), st.text("abI 'st\n\t1é日_.,\u00a0", max_size=60))


@given(TEXT, st.integers(1, 20))
def test_the_tokens_of_the_pieces_are_those_of_the_text(text: str, num_chars: int) -> None:
    parts = list(pieces(text, num_chars))
    assert "".join(parts) == text
    assert [i for part in parts for i in TOKENIZER.encode_text(part)] == TOKENIZER.encode_text(text)


def test_text_is_cut_between_words_only() -> None:
    assert list(pieces("one two three", 1)) == ["one", " two", " three"]
    assert list(pieces("a. b 1 c  d \u00e9 e\n f", 1)) == ["a. b 1 c  d \u00e9 e\n f"]
    assert list(pieces("one two three", 5)) == ["one two", " three"]
    assert list(pieces("one . two three four", 5)) == ["one . two", " three", " four"]
    assert list(pieces("", 5)) == [""]


def test_a_place_to_cut_is_found_after_many_spaces_that_are_none() -> None:
    parts = list(pieces("1 " * 5000 + "a b " + "c" * 50, 10))
    assert [len(part) for part in parts] == [10_001, 53]


@pytest.mark.parametrize(
    "text", ["word " * 100_000, "日本語" * 50_000, "9 " * 200_000], ids=["cut", "not", "digits"]
)
def test_long_text_has_the_tokens_of_the_library(tokenizer: ModelTokenizer, text: str) -> None:
    whole = tokenizer._ordinary.encode(text, add_special_tokens=False).ids  # noqa: SLF001  in one piece
    assert tokenizer.encode_text(text) == whole
    assert tokenizer.encode_segments([text]) == whole


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return TOKENIZER


def test_text_beyond_the_limit_is_not_tokenised_to_its_end(tokenizer: ModelTokenizer) -> None:
    text = "word " * PIECE_CHARS
    num_tokens = len(tokenizer.encode_text(text))
    assert len(tokenizer.encode_text(text, limit=num_tokens)) == num_tokens
    for limit in (num_tokens - 1, 1000, 0):
        with pytest.raises(TooManyTokens):
            tokenizer.encode_text(text, limit=limit)
        with pytest.raises(TooManyTokens):
            tokenizer.encode_text("<|start|>" + text, allow_special=True, limit=limit + 1)
        with pytest.raises(TooManyTokens):
            tokenizer.encode_segments(["Hello", text], limit=limit + len(tokenizer.encode_text("Hello")))
