"""Random words, phrases and sentences for the demo model's training dialogues."""

import functools
import random
import re
import string
import zlib
from pathlib import Path
from typing import Any

import yaml

_LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("demo_words.yaml").read_text())
NOUNS: list[str] = _LISTS["nouns"]
ADJECTIVES: list[str] = _LISTS["adjectives"]
VERBS: list[str] = _LISTS["verbs"]
CITIES: list[str] = _LISTS["cities"]
NAMES: list[str] = _LISTS["names"]
LANGUAGES: list[str] = _LISTS["languages"]
CURRENCIES: list[str] = _LISTS["currencies"]
ZONES: list[str] = _LISTS["zones"]
DAYS: list[str] = _LISTS["days"]
MAIL_DOMAINS: list[str] = _LISTS["domains"]
CAPITALS: dict[str, str] = _LISTS["capitals"]
COUNTRIES = list(CAPITALS)
_SYLLABLES = (_LISTS["onsets"], _LISTS["vowels"], _LISTS["codas"])
_ENDINGS = ["", "", "s", "s", "ing", "ed", "er", "est", "ly", "ic", "ia"]


def is_held_back(word: str) -> bool:
    """A tenth of all words is used as values only in scoring, never in training."""
    return zlib.crc32(word.encode()) % 10 == 0


@functools.cache
def general_words() -> list[str]:
    """Every word of the YAML files in this folder that is not held out."""
    texts = [path.read_text() for path in sorted(Path(__file__).parent.glob("demo_*.yaml"))]
    words = {word for text in texts for word in re.findall(r"[A-Za-z]+", text)}
    return sorted(word for word in words if not is_held_back(word))


def pseudo_word(rng: random.Random) -> str:
    """An invented word, or one out of context, which can only be copied."""
    style = rng.random()
    if style < 0.35:
        return rng.choice(general_words()).lower() + rng.choice(_ENDINGS)
    if style < 0.45:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8)))
    size = rng.choice((1, 2, 2, 3))
    return "".join(rng.choice(sounds) for _ in range(size) for sounds in _SYLLABLES)


class Words:
    """Random words: training words or held-out ones."""

    def __init__(self, rng: random.Random, *, held_back: bool = False) -> None:
        self.rng = rng
        self.held_back = held_back

    def pick(self, words: list[str], pseudo: float = 0.25) -> str:
        """One of `words`; with the given probability an invented word in the same case."""
        if self.rng.random() < pseudo:
            word = pseudo_word(self.rng)
            return word.capitalize() if words[0][0].isupper() else word
        return self.rng.choice([word for word in words if is_held_back(word) == self.held_back] or words)

    def phrase(self) -> str:
        """One to eight words, like a search query."""
        rng = self.rng
        parts = [self.pick(NOUNS)] if rng.random() < 0.5 else [self.pick(ADJECTIVES), self.pick(NOUNS)]
        if rng.random() < 0.4:
            link = rng.choice(["in", "for", "of", "with", "from", "near", "and", "on"])
            parts += [link, self.pick(NOUNS + NAMES)]
        if rng.random() < 0.25:
            parts.insert(0, rng.choice(["best", "history of", "how to make", "cheap", "latest", "what is"]))
        if rng.random() < 0.15:
            parts = [pseudo_word(rng) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.15:
            parts.insert(0, rng.choice(["the", "a", "my", "all", "our", "every"]))
        if rng.random() < 0.2:
            more = ["2018", "2025", "2026", "news", "tutorial", "price"]
            parts.append(rng.choice([*CITIES, *COUNTRIES, *more]))
        return " ".join(parts)

    def sentence(self) -> str:
        """A short text of one or two plain sentences, or of invented words."""
        rng, style = self.rng, self.rng.random()
        if style < 0.15:
            link = rng.choice([". ", ", ", " and ", "? ", "! "])
            return self._plain_sentence() + link + self._plain_sentence()
        if style < 0.4:
            words = [pseudo_word(rng) + rng.choice(["", "", "", "", ","]) for _ in range(rng.randint(1, 7))]
            text = " ".join([words[0].capitalize(), *words[1:]]).strip(",")
            return text + rng.choice(["", "", ".", "!", "?"])
        return self._plain_sentence()

    def _plain_sentence(self) -> str:
        rng = self.rng
        noun, other, adjective = self.pick(NOUNS), self.pick(NOUNS), self.pick(ADJECTIVES)
        name = self.pick(NAMES)
        sentences = [
            f"The {noun} is {adjective}",
            f"{name} will bring the {noun}",
            f"I like the {adjective} {noun}",
            f"Please send the {noun} to {name}",
            f"The {noun} and the {other} are {adjective}",
            f"We need a {adjective} {noun} for the {other}",
            f"{name} says hello",
            f"Where is the {adjective} {noun}",
            f"The {noun} starts at {rng.randint(1, 12)}",
            f"My {noun} has {rng.randint(2, 90)} {other}s",
        ]
        return rng.choice(sentences)
