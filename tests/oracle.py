"""openai-harmony as an oracle, with gpt-oss's real vocabulary: a pytest plugin."""

from pathlib import Path

import openai_harmony as oh  # type: ignore[import-untyped]  # no types
import pytest

from frontend.text.tokenizer import ModelTokenizer
from tools.fetch_vocab import vocabulary_folder


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    """The vocabulary's folder."""
    folder = vocabulary_folder()
    if folder is None:
        pytest.skip("no vocabulary: run `make vocab`, or set BATON_O200K to o200k_base.tiktoken")
    return folder


@pytest.fixture(scope="session")
def tokenizer(vocabulary: Path) -> ModelTokenizer:
    """Baton's tokenizer."""
    return ModelTokenizer.load(vocabulary)


@pytest.fixture(scope="session")
def oracle(vocabulary: Path) -> oh.HarmonyEncoding:
    """openai-harmony's encoding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary))
        return oh.load_harmony_encoding(oh.HarmonyEncodingName.HARMONY_GPT_OSS)
