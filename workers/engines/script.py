"""Scripts for the mocker: prepared answers, so that agents can run whole sessions without a model."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import yaml

_CONTROL = re.compile(r"(<\|\w+\|>)")
MAX_SCRIPT_BYTES = 4 << 20


class Scene(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers to prompts that contain `when` (empty matches all). A prompt that has n earlier answers gets
    `answers[n]`, or the last one.

    They are Harmony as gpt-oss writes it, after `<|start|>assistant`, up to `<|return|>` or `<|call|>`.
    """

    answers: list[str]
    when: str = ""


class Script:
    """Scenes over one vocabulary; the first that matches a prompt is played."""

    def __init__(self, path: Path, vocabulary: "Vocabulary") -> None:
        """Read a YAML list of scenes. Raises OSError, or ValueError if it is invalid."""
        raw = path.read_bytes()
        if len(raw) > MAX_SCRIPT_BYTES:
            raise ValueError(f"{path}: {len(raw)} bytes; at most {MAX_SCRIPT_BYTES} are allowed")
        try:
            scenes = msgspec.convert(yaml.safe_load(raw), list[Scene])
        except (yaml.YAMLError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}: not a script: {error}") from error
        if not all(scene.answers for scene in scenes):
            raise ValueError(f"{path}: a scene has no answers")
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
    """The vocabulary of a byte-level BPE `tokenizer.json`. Encoding does not merge as BPE does: any tokens
    that spell the text will do. `header` is a final message's, `words` are plain ones.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, KeyError, ValueError if the file is missing or invalid."""
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        ids: dict[str, int] = tokenizer["model"]["vocab"]
        special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        self._special = special
        self._by_text = {_bytes_of(text): token_id for text, token_id in ids.items()}
        self._by_id = {token_id: text for text, token_id in self._by_text.items()}
        self._max_bytes = max(map(len, self._by_text))
        self._call = special["<|call|>"]
        self.header = self.encode("<|channel|>final<|message|>")
        words = [text for text in ids if text.removeprefix("Ġ").isascii() and text.isalpha()]
        self.words = tuple(sorted(ids[text] for text in words))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids; `<|name|>` is a control token. Raises ValueError for an unknown one."""
        ids: list[int] = []
        for part in _CONTROL.split(text):
            if not _CONTROL.fullmatch(part):
                ids += self._encode_plain(part.encode())
            elif part in self._special:
                ids.append(self._special[part])
            else:
                raise ValueError(f"the vocabulary has no {part}")
        return tuple(ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text, without control tokens."""
        return b"".join(self._by_id.get(token_id, b"") for token_id in token_ids).decode(errors="replace")

    def num_answers(self, prompt: Sequence[int]) -> int:
        """The number of the model's answers in the prompt: calls and final messages."""
        size = len(self.header)
        finals = sum(tuple(prompt[i : i + size]) == self.header for i in range(len(prompt)))
        return finals + prompt.count(self._call)

    def _encode_plain(self, data: bytes) -> Iterable[int]:
        at = 0
        while at < len(data):
            length = next(n for n in range(self._max_bytes, 0, -1) if data[at : at + n] in self._by_text)
            yield self._by_text[data[at : at + length]]
            at += length


def _bytes_of(text: str) -> bytes:
    return bytes(_BYTE[character] for character in text)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte mapping: printable bytes map to themselves, others to characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE = _byte_of_character()


def log_prompt(log: Path, token_ids: Sequence[int]) -> None:
    """Append a prompt as one JSON line, in one write: prefill and decode workers may share the file."""
    with log.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(token_ids) + b"\n")
