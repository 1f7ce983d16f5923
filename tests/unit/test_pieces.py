"""Text in pieces: its tokens are those of the whole, and no piece is long."""

import pytest

from frontend.text.tokenizer import PIECE_CHARS, TooManyTokens
from tests.scripted_frontend import TOKENIZER


@pytest.mark.parametrize(
    "text", ["word " * 100_000, "日本語" * 50_000, "9 " * 200_000], ids=["words", "signs", "digits"]
)
def test_long_text_has_the_tokens_of_the_library(text: str) -> None:
    whole = TOKENIZER._ordinary.encode(text, add_special_tokens=False).ids  # noqa: SLF001  in one piece
    assert TOKENIZER.encode_text(text) == whole
    assert list(TOKENIZER.encode_text_segment(text)) == whole


def test_text_beyond_the_limit_is_not_tokenised_to_its_end() -> None:
    text = "word " * PIECE_CHARS
    num_tokens = len(TOKENIZER.encode_text(text))
    assert len(TOKENIZER.encode_text(text, limit=num_tokens)) == num_tokens
    for limit in (num_tokens - 1, 1000, 0):
        with pytest.raises(TooManyTokens):
            TOKENIZER.encode_text(text, limit=limit)
        with pytest.raises(TooManyTokens):
            TOKENIZER.encode_text("<|start|>" + text, allow_special=True, limit=limit + 1)
        with pytest.raises(TooManyTokens):
            TOKENIZER.encode_text_segment(text + "!", limit // 2)
