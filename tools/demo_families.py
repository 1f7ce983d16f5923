"""Tool families: those of `demo_domains.yaml`, and randomly invented ones."""

import functools
import random
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from tools.demo_words import ADJECTIVES, NOUNS, VERBS, Words

Family = dict[str, Any]
# Families that answer the same question are never offered together.
_CONFUSABLE = (
    {"calculator", "add"},
    {"calculator", "multiply"},
    {"query_database", "run_sql"},
    {"set_timer", "set_reminder"},
    {"search", "get_news"},
    {"search", "define_word"},
)
_KINDS = [
    "noun",
    "noun",
    "id",
    "int:1:999",
    "person",
    "isodate",
    "phrase",
    "num",
    "city",
    "email",
    "time",
    "enum",
]


@functools.cache
def families() -> list[Family]:
    """Every family of the file; `key` is the name of its first tool."""
    loaded: list[Family] = yaml.safe_load(Path(__file__).with_name("demo_domains.yaml").read_text())
    for family in loaded:
        family["key"] = family["names"][0] + ("" if family["params"] else "()")
    return loaded


def slots_of(template: str) -> set[str]:
    """The names in braces."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def required_slots(family: Family) -> set[str]:
    """The keys of a family's required parameters."""
    return {key for key, param in family["params"].items() if param.get("required")}


def confusable(one: Family, other: Family) -> bool:
    """Whether a request for one could also be meant for the other."""
    keys = {one["key"], other["key"]}
    return len({key.removesuffix("()") for key in keys}) == 1 or keys in _CONFUSABLE


def random_kind(words: Words) -> str:
    """A kind of value; choices are invented."""
    kind = words.rng.choice(_KINDS)
    if kind != "enum":
        return kind
    return "enum:" + "|".join(words.pick(ADJECTIVES) for _ in range(words.rng.randint(2, 4)))


def invented_family(words: Words) -> Family:
    """A verb, a noun and parameters with random names, so that the model must read the names."""
    rng = words.rng
    noun, verb = words.pick(NOUNS, 0.1), words.pick(VERBS, 0.05)
    *extra, field = rng.sample([n for n in NOUNS if n != noun], 4)
    key = rng.choice([f"{noun}_id", "id", noun, "name", f"{noun}_name"])
    keys = [key, *extra[: rng.randint(0, 2)]]
    params = {k: _param(words, k, required=k == key or rng.random() < 0.3) for k in keys}
    thing = f"{noun} {{{key}}}"
    if rng.random() < 0.35:
        family, heads = _lookup(words, noun, field, thing)
    else:
        family, heads = _action(words, noun, verb, thing, extra[2])
    asks = [head + mentions for head in heads for mentions in _mentions(rng, keys[1:], params)]
    follow_ups = [f"And {thing}?"]
    return family | {"key": family["names"][0], "params": params, "asks": asks, "follow_ups": follow_ups}


def _lookup(words: Words, noun: str, field: str, thing: str) -> tuple[Family, list[str]]:
    """A tool that looks something up."""
    names = [f"get_{noun}_{field}", f"{noun}_{field}", f"lookup_{field}", f"fetch_{noun}_{field}"]
    about = [f"Returns the {field} of a {noun}", f"Get the {field} of the {noun}"]
    about.append(f"{field.capitalize()} lookup for {noun}s")
    heads = [f"What is the {field} of the {thing}", f"Get the {field} for {thing}"]
    heads += [f"I need the {field} of {thing}", f"Tell me the {field} of {thing}"]
    answers = [f"The {field} of {thing} is {{{field}}}.", f"The {field} is {{{field}}}."]
    outcomes = [{"result": {field: random_kind(words)}, "answers": answers}]
    return {"names": names, "about": about, "goal": [f"the {field} of {thing}"], "outcomes": outcomes}, heads


def _action(words: Words, noun: str, verb: str, thing: str, field: str) -> tuple[Family, list[str]]:
    """A tool that performs an action."""
    names = [f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"do_{verb}_{noun}"]
    about = [
        f"{verb.capitalize()} a {noun}",
        f"{verb.capitalize()}s the given {noun}",
        f"Use this to {verb} a {noun}.",
        "",
    ]
    heads = [
        f"{verb.capitalize()} the {thing}",
        f"Please {verb} {thing}",
        f"I want to {verb} the {thing}",
        f"Can you {verb} {thing}",
    ]
    states = words.rng.choice(["done|ok|success", words.pick(ADJECTIVES), "pending|queued"])
    result = {"status|state|result": f"enum:{states}"}
    answers = [f"Done: the {thing} has the status {{status}}.", f"The status of {thing} is {{status}}."]
    if words.rng.random() < 0.5:
        result[field] = random_kind(words)
        answers = [f"{answer} The {field} is {{{field}}}." for answer in answers]
    outcomes = [{"result": result, "answers": answers}]
    return {"names": names, "about": about, "goal": [f"to {verb} the {thing}"], "outcomes": outcomes}, heads


def _mentions(rng: random.Random, keys: list[str], params: dict[str, Any]) -> list[str]:
    """The optional parameters as the user mentions them: those that are required, and all."""
    needed = [key for key in keys if params[key]["required"]]
    return ["".join(_mention(rng, key) for key in chosen) for chosen in (needed, rng.sample(keys, len(keys)))]


def _mention(rng: random.Random, key: str) -> str:
    word, slot = key.replace("_", " "), f"{{{key}}}"
    ways = [" with {} {}", ", {} {}", ", {}: {}", " and {} {}", " with the {} {}", " ({} = {})"]
    return rng.choice(ways).format(word, slot)


def _param(words: Words, key: str, *, required: bool) -> dict[str, Any]:
    word = key.replace("_", " ")
    kind = "id" if required and words.rng.random() < 0.5 else random_kind(words)
    about = ["", f"The {word}", f"{word.capitalize()} to use"]
    return {"names": [key], "kind": kind, "required": required, "about": about}
