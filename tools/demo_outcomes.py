"""Tool results in many shapes, and the answers that use them."""

import json
import random
from typing import NamedTuple

from tools.demo_families import random_kind
from tools.demo_requests import Request
from tools.demo_values import random_value
from tools.demo_words import NOUNS, Words

_FAILURES = ["not found", "timeout", "permission denied", "service unavailable", "invalid input"]


class Outcome(NamedTuple):
    """A tool's result: as text, as facts (name, value), and as the answer for the user."""

    text: str
    facts: tuple[tuple[str, str], ...]
    answer: str


def random_outcome(words: Words, asked: Request) -> Outcome:
    """A result for this request; one in twenty is a failure."""
    rng = words.rng
    if rng.random() < 0.05:
        return _failure(words, asked)
    chosen = rng.choice(asked.offer.family["outcomes"])
    fields: dict[str, object] = {}
    said = dict(asked.spoken)
    for spec, kind in chosen["result"].items():
        slot, name = spec.split("|")[0], rng.choice(spec.split("|"))
        fields[name] = _result_value(words, kind, asked)
        said[slot] = _plain(fields[name])
    answer = rng.choice(chosen["answers"]).format(**said)
    facts = tuple((name, _plain(value)) for name, value in fields.items())
    if rng.random() < 0.15:
        answer = _plain_answer(facts)
    if rng.random() < 0.25:
        fields[rng.choice(NOUNS)] = random_value(words, random_kind(words)).json
    return Outcome(_result_text(rng, fields), facts, answer)


def _plain(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _result_value(words: Words, kind: str, asked: Request) -> object:
    if kind.startswith("="):
        return json.loads(kind[1:])
    return asked.spoken[kind[1:]] if kind.startswith("@") else random_value(words, kind).json


def _failure(words: Words, asked: Request) -> Outcome:
    reason = words.rng.choice([*_FAILURES, words.phrase()])
    answer = words.rng.choice(["I am sorry, {} failed: {}.", "That did not work: {} says {}."])
    text = json.dumps({"error": reason}, separators=(",", ":"))
    return Outcome(text, (("error", reason),), answer.format(asked.offer.tool.name, reason))


def _plain_answer(facts: tuple[tuple[str, str], ...]) -> str:
    parts = [f"the {name.replace('_', ' ')} is {value}" for name, value in facts]
    text = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"{text[0].upper()}{text[1:]}."


def _result_text(rng: random.Random, fields: dict[str, object]) -> str:
    shape = rng.random()
    if shape < 0.08:
        return "\n".join(f"{name}: {value}" for name, value in fields.items())
    if shape < 0.16 and len(fields) == 1:
        return str(next(iter(fields.values())))
    wrapped: object = fields
    if shape < 0.24:
        wrapped = {rng.choice(["result", "data", "response", "output"]): fields}
    elif shape < 0.28:
        wrapped = [fields]
    separators = (",", ":") if rng.random() < 0.6 else None
    indent = 2 if shape > 0.96 else None
    return json.dumps(wrapped, separators=separators, ensure_ascii=False, indent=indent)
