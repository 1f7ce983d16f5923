"""Text in pieces: nothing is lost, and its tokens are those of the whole."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.tokenizer import PIECE_CHARS, ModelTokenizer, TooManyTokens, cut
from tests.scripted_frontend import TOKENIZER, byte_tokenizer


def cut_everywhere(text: str) -> Iterator[tuple[str, str]]:
    start = 1
    while (stop := cut(text, start, len(text))) is not None and stop < len(text):
        yield text[:stop], text[stop:]
        start = stop + 1


TEXT = st.one_of(st.text(), st.text("abI 'st\n\t1é日_.,\u00a0", max_size=60))


@given(TEXT)
def test_the_tokens_of_the_parts_are_those_of_the_text(text: str) -> None:
    whole = TOKENIZER.encode_text(text)
    for part, rest in cut_everywhere(text):
        assert TOKENIZER.encode_text(part) + TOKENIZER.encode_text(rest) == whole


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one two. 3 four", "one| two|.| 3| four"),
        ("a\n\nb\n c\n\n3", "a|\n\n|b|\n c|\n\n|3"),
        ("x1y23 4", "x|1|y|23| 4"),
        ("it's 'it' 's", "it's| 'it'| 's"),
        ("é日1 . - -1\u00b2", "é日1| .| -| -|1\u00b2"),
        ("a   b  \n  1", "a|   b|  \n  1"),
        ("--==__..", "--==__.."),
        ("", ""),
    ],
)
def test_text_is_cut_where_no_token_crosses(text: str, parts: str) -> None:
    cuts = [len(part) for part, _ in cut_everywhere(text)]
    assert "|".join(text[i:j] for i, j in pairwise([0, *cuts, len(text)])) == parts


def test_a_cut_is_looked_for_within_bounds() -> None:
    assert [cut("a b c d", start, start + 3) for start in range(5)] == [1, 1, 3, 3, 5]
    assert cut("a bcdef g", 2, 6) is None


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


@pytest.mark.parametrize("char", [" ", "-", "7", "a", "日", "👍", "\n"])
def test_the_library_gets_pieces_of_bounded_length_whatever_the_text(
    char: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, lengths = byte_tokenizer(), []

    def noting(text: str) -> list[int]:
        lengths.append(len(text))
        return list(text.encode())

    monkeypatch.setattr(tokenizer, "_encode_valid", noting)
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: bytes([token_id]))
    assert tokenizer.encode_text(char * 10 * PIECE_CHARS) == list(char.encode()) * 10 * PIECE_CHARS
    assert max(lengths) <= 2 * PIECE_CHARS
