"""The tokenizer, on a small vocabulary that the test trains itself, and long texts on the demo model's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from frontend.text.tokenizer import PIECE_CHARS, ModelTokenizer, SpecialToken, TooManyTokens
from tests.scripted_frontend import TOKENIZER

ENTRY_BYTES = 308  # of one character and one token
TEXT = ["Hello there, hello world.", "<|end|> is a control token", "naïve 日本 👍"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, specials = tmp_path_factory.mktemp("model"), [token.value for token in SpecialToken]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer.load(folder)


@pytest.mark.parametrize(
    "text", ["", "Hello", "日本 👍\r\n\x00\ufeff", "a <|end|><|start|>b", "<|endoftext|>"]
)
def test_text_goes_there_and_back_and_never_becomes_a_control_token(
    tokenizer: ModelTokenizer, text: str
) -> None:
    for ids in (tokenizer.encode_text(text), tokenizer.encode_text_segment(text)):
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.special_ids.values())


def test_control_tokens_come_from_text_where_they_are_allowed(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode_text("<|start|>Hello<|end|><|endo", allow_special=True)
    start, end = (tokenizer.special_ids[token] for token in (SpecialToken.START, SpecialToken.END))
    assert ids == [start, *tokenizer.encode_text("Hello"), end, *tokenizer.encode_text("<|endo")]


def test_the_texts_kept_the_longest_make_room_for_new_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.text.tokenizer._CACHE_BYTES", 16 * ENTRY_BYTES)
    encode = ModelTokenizer.load(folder).encode_text_segment
    first = [encode(text) for text in "abcdefghijklmnop"]
    assert [encode(text) is ids for text, ids in zip("abcdefghijklmnop", first, strict=True)] == [True] * 16
    encode("q")
    assert encode("b") is first[1]
    assert encode("a") is not first[0]
    assert encode("q" * ENTRY_BYTES) is not encode("q" * ENTRY_BYTES), "an eighth of all is too much for one"


def test_control_tokens_and_unknown_ids_have_no_bytes(tokenizer: ModelTokenizer) -> None:
    for token_id in (*tokenizer.special_ids.values(), -1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(token_id) == b""
    assert len(tokenizer.vocabulary.token_bytes) == tokenizer.vocab_size


def test_a_vocabulary_that_adds_tokens_to_texts_adds_none(folder: Path, tmp_path: Path) -> None:
    parts: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    first, text = {"SpecialToken": {"id": "Hello", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    parts["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"Hello": {"id": "Hello", "ids": [50], "tokens": ["Hello"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    plain, odd = ModelTokenizer.load(folder), ModelTokenizer.load(tmp_path)
    assert odd.encode_text("Hello there") == plain.encode_text("Hello there")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda parts: parts["added_tokens"].clear(), r"has no <\|call\|>, <\|channel\|>"),
        (lambda parts: parts["model"]["vocab"].update({"▁word": 5000}), "not in byte-level encoding"),
        (
            lambda parts: [
                parts["pre_tokenizer"].update(use_regex=False),
                parts["model"].update(ignore_merges=True),
            ],
            "as a control token",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Any], object], expected: str
) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text())
    change(parts)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    with pytest.raises(ValueError, match=expected):
        ModelTokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"added_tokens": [], "model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises((ValueError, OSError), match="tokenizer"):
        ModelTokenizer.load(tmp_path)


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
