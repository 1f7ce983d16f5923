"""Tokenising against openai-harmony, with gpt-oss's real vocabulary (`make vocab`)."""

import openai_harmony as oh  # type: ignore[import-untyped]  # no types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.pieces import pieces
from frontend.text.tokenizer import ModelTokenizer

pytest_plugins = ["tests.oracle"]


@given(st.one_of(st.text(), st.text("aB1 '\n\r\t<|>end日é👍_.,\u2028\u00a0", max_size=40)))
def test_text_becomes_the_same_tokens(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, text: str
) -> None:
    ids = tokenizer.encode_text(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert tokenizer.decode(ids) == text


@given(st.text("aB1 '\n\r\t.,-sS\u00a0é", max_size=60), st.integers(1, 10))
def test_text_in_pieces_becomes_the_same_tokens(tokenizer: ModelTokenizer, text: str, num_chars: int) -> None:
    parts = pieces(text, num_chars)
    assert [i for part in parts for i in tokenizer.encode_text(part)] == tokenizer.encode_text(text)


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
