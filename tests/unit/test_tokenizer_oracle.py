"""Tokenising against openai-harmony, with gpt-oss's real vocabulary (`make vocab`)."""

import os
from collections.abc import Iterator
from pathlib import Path

import openai_harmony as oh  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from frontend.tokenizer import ModelTokenizer
from tools.fetch_vocab import vocabulary_folder

FUZZ = settings(
    max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def vocabulary() -> Path:
    folder = vocabulary_folder()
    if folder is None:
        pytest.skip("no vocabulary: run `make vocab`, or set BATON_O200K to o200k_base.tiktoken")
    return folder


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Path) -> ModelTokenizer:
    return ModelTokenizer.load(vocabulary)


@pytest.fixture(scope="module")
def oracle(vocabulary: Path) -> Iterator[oh.HarmonyEncoding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary))
        yield oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)


@FUZZ
@given(st.one_of(st.text(), st.text("aB1 '\n\r\t<|>end日é👍_.,\u2028\u00a0", max_size=40)))
def test_text_becomes_the_same_tokens(
    tokenizer: ModelTokenizer, oracle: oh.HarmonyEncoding, text: str
) -> None:
    ids = tokenizer.encode_text(text)
    assert ids == oracle.encode(text, disallowed_special=())
    assert tokenizer.decode(ids) == text


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
