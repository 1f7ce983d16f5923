"""Tokenising against openai-harmony, with gpt-oss's real vocabulary (`make vocab`)."""

import random
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits, punctuation

import openai_harmony as oh  # type: ignore[import-untyped]  # no types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.tokenizer import PIECE_CHARS, ModelTokenizer

pytest_plugins = ["tests.oracle"]


@given(st.one_of(st.text(), st.text("aB1 '\n\r\t<|>end日é👍_.,\u2028\u00a0", max_size=40)))
def test_text_becomes_the_same_tokens(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, text: str
) -> None:
    ids = tokenizer.encode_text(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert tokenizer.decode(ids) == text


def _random(alphabet: str, num_chars: int = 5 * PIECE_CHARS) -> str:
    return "".join(random.Random(7).choices(alphabet, k=num_chars))


@pytest.mark.parametrize(
    "text",
    [
        " " * 5 * PIECE_CHARS, "-" * 5 * PIECE_CHARS, "a" * 5 * PIECE_CHARS, "\n" * 5 * PIECE_CHARS,
        "word" + " " * 5 * PIECE_CHARS + "word", "日本語" * 2 * PIECE_CHARS, "👍" * 3 * PIECE_CHARS,
        "\n" + "    \n" * PIECE_CHARS, "\u3000" * 5 * PIECE_CHARS, "=-" * 3 * PIECE_CHARS + "é",
        _random("0123456789"), _random(ascii_letters), _random(ascii_letters + digits + "+/"),
        _random(ascii_lowercase), _random(ascii_uppercase), _random(punctuation), _random("日本語、。中文字"),
        _random("กขคงจฉชซ่้"), _random("👍👎😀é"), _random(" \t\n\r"), _random("aé日B1 -.\n"),
        "It's a long text, isn't it?\n" * PIECE_CHARS, _random("aB1 '\n\r\t.,-/sS\u00a0\x1c\u0301é日²"),
    ],
    ids=lambda text: ascii(text[:6]),
)  # fmt: skip
def test_long_texts_become_the_same_tokens(tokenizer: ModelTokenizer, text: str) -> None:
    whole = tokenizer._ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids  # noqa: SLF001
    assert tokenizer.encode_text(text) == whole


@pytest.mark.parametrize("text", ["\ud83d", "a\ude00b", "\ud83d\ude00", "x\ud800\ud800"])
def test_lone_surrogates_become_the_same_tokens(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, text: str
) -> None:
    assert tokenizer.encode_text(text) == oracle.encode(text)


def test_the_control_tokens_have_their_ids(tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding) -> None:
    for token, token_id in tokenizer.special_ids.items():
        assert [token_id] == oracle.encode(token.value, allowed_special="all")
    assert sorted(tokenizer.stop_token_ids) == [199999, *sorted(oracle.stop_tokens_for_assistant_actions())]
    assert tokenizer.vocab_size == 201088


def test_every_token_has_the_same_bytes(tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding) -> None:
    ids = range(199_998)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode(errors="replace") == oracle.decode(
        list(ids)
    )
