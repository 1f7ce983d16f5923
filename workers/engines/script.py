"""Scripts for the mocker: prepared answers, so that agents can run whole sessions without a model."""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import yaml


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers to prompts that contain `when` (empty matches all). A prompt that has n earlier answers gets
    `answers[n]`, or the last one.

    They are Harmony as gpt-oss writes it, after `<|start|>assistant`, up to `<|return|>` or `<|call|>`."""

    answers: Annotated[list[str], msgspec.Meta(min_length=1)]
    when: str = ""


class Script:
    """Scenes over one vocabulary; the first that matches a prompt is played."""

    def __init__(self, path: Path, vocabulary: "Vocabulary") -> None:
        """Read a YAML list of scenes. Raises OSError, or ValueError if it is invalid."""
        try:
            scenes = msgspec.convert(yaml.safe_load(path.read_bytes()), list[Scene])
        except (yaml.YAMLError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}: not a script: {error}") from error
        self._vocabulary = vocabulary
        self._scenes = [(s.when, [vocabulary.encode(answer) for answer in s.answers]) for s in scenes]

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """The answer to a prompt; empty if no scene matches."""
        text = self._vocabulary.decode(prompt)
        for when, answers in self._scenes:
            if when in text:
                return answers[min(self._vocabulary.num_answers(prompt), len(answers) - 1)]
        return ()


class Vocabulary:
    """A model's `tokenizer.json`. `header` is a final message's, `words` are plain ones."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, ImportError, ValueError if the file is missing or invalid."""
        library = importlib.import_module("tokenizers")  # not among the dependencies of all workers
        text = path.read_text(encoding="utf-8")
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: {error}") from error
        self.header, (self._call,) = self.encode("<|channel|>final<|message|>"), self.encode("<|call|>")
        ids = self._tokenizer.get_vocab(with_added_tokens=False)
        words = [text for text in ids if text.removeprefix("Ġ").isascii() and text.isalpha()]
        self.words = tuple(sorted(ids[text] for text in words))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; `<|name|>` is a control token. Raises ValueError for an unknown one."""
        for name in re.findall(r"<\|\w+\|>", text):
            if self._tokenizer.token_to_id(name) is None:
                raise ValueError(f"the vocabulary has no {name}")
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without control tokens."""
        return str(self._tokenizer.decode(token_ids))

    def num_answers(self, prompt: Sequence[int]) -> int:
        """The number of the model's answers in the prompt: calls and final messages."""
        size = len(self.header)
        finals = sum(tuple(prompt[i : i + size]) == self.header for i in range(len(prompt)))
        return finals + prompt.count(self._call)


def log_prompt(log: Path, token_ids: Sequence[int]) -> None:
    """Append a prompt as one JSON line, in one write: prefill and decode workers may share the file."""
    with log.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(token_ids) + b"\n")
