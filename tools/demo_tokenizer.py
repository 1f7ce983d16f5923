"""The demo model's byte-level BPE: trained on its dialogues, with Harmony's control tokens."""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from frontend.harmony.conversation import render
from frontend.text.tokenizer import Segment, SpecialToken
from tools.demo_dialogues import Dialogue, completion
from tools.demo_words import ADJECTIVES, CAPITALS, CITIES, NAMES, NOUNS, VERBS, pseudo_word

NUM_IDS = 3072
# Spaces, digits and punctuation marks are always separate pieces, so that a word has the same tokens in a
# sentence, in quotes and in a name_with_underscores: copying then means repeating tokens.
_PIECES = Regex(r"\p{Lu}?\p{Ll}+|\p{Lu}+|\p{L}+|\p{N}|\n+|\s|[^\s\p{L}\p{N}]")


def train_tokenizer(num_dialogues: int = 6000) -> Tokenizer:
    """Learn merges from dialogues and words; every byte has an id, the control tokens have the last ones."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_PIECES, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS - len(SpecialToken),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_dialogues), trainer)
    tokenizer.add_special_tokens([token.value for token in SpecialToken])
    return tokenizer


def _texts(num_dialogues: int) -> Iterator[str]:
    for seed in range(num_dialogues):
        for example in Dialogue(random.Random(f"tokenizer {seed}")).examples():
            segments = [*render(example.conversation), *completion(example.answer)]
            yield from (segment for segment in segments if isinstance(segment, str))
    rng = random.Random("tokenizer words")
    words = [*NOUNS, *ADJECTIVES, *VERBS, *CITIES, *NAMES, *CAPITALS, *CAPITALS.values()]
    for _ in range(60):
        yield " ".join(
            [*words, *(word.capitalize() for word in words), *(pseudo_word(rng) for _ in range(300))]
        )


def token_id(tokenizer: Tokenizer, token: SpecialToken) -> int:
    """The id of a control token."""
    number = tokenizer.token_to_id(token.value)
    if number is None:
        raise ValueError(f"the tokenizer lacks {token.value}")
    return number


def encode(tokenizer: Tokenizer, segments: list[Segment]) -> list[int]:
    """Ids of a rendered prompt or completion, which must not spell control tokens."""
    ids: list[int] = []
    for segment in segments:
        if isinstance(segment, SpecialToken):
            ids.append(token_id(tokenizer, segment))
        else:
            ids += tokenizer.encode(segment, add_special_tokens=False).ids
    return ids


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the `tokenizer_config.json` that transformers reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SpecialToken.STARTOFTEXT.value,
        "eos_token": SpecialToken.RETURN.value,
        "pad_token": SpecialToken.ENDOFTEXT.value,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/demo"))
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    save(train_tokenizer(), folder)


if __name__ == "__main__":
    main()
