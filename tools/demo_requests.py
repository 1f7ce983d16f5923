"""User requests for tools: one or two, with the arguments in the sentence, in many tones."""

import random
from typing import NamedTuple

from tools.demo_families import required_slots, slots_of
from tools.demo_toolbox import Offer
from tools.demo_values import Value, random_value
from tools.demo_words import Words

_OPENERS = ["Hey, ", "Hi! ", "Please ", "Quick question: ", "Hello, ", "Hey, quick check: ", "OK, "]
_OPENERS += ["Can you help me? ", "So, "]
_FILLERS = [
    "really",
    "just",
    "right now",
    "actually",
    "maybe",
    "again",
    "for me",
    "quickly",
    "now",
    "then",
    "also",
    "well,",
]
_QUOTABLE = {"phrase", "title", "noun", "path", "markdown", "sql", "sentence"}


class Request(NamedTuple):
    """A request that the tool of `offer` fulfils; `spoken` has the values for the family's templates."""

    offer: Offer
    text: str
    goal: str
    arguments: dict[str, object]
    spoken: dict[str, str]
    is_new_wording: bool


def random_request(words: Words, offer: Offer, *, follow_up: bool = False) -> Request:
    """A request for the tool; a follow-up omits what was said before."""
    rng, family = words.rng, offer.family
    template, is_new = _template(words, offer, follow_up=follow_up)
    kinds = {key: family["params"][key]["kind"] for key in offer.names if key in slots_of(template)}
    values = {key: random_value(words, kind) for key, kind in kinds.items()}
    said = {key: _said(rng, kinds[key], value, template) for key, value in values.items()}
    goal = rng.choice([goal for goal in family["goal"] if slots_of(goal) <= values.keys()])
    arguments = {offer.names[k]: str(v.json) if k in offer.as_text else v.json for k, v in values.items()}
    spoken = {key: value.spoken for key, value in values.items()}
    text = in_a_tone(rng, template if is_new else reworded(rng, template)).format(**said)
    return Request(offer, text, goal.format(**spoken), arguments, spoken, is_new)


def _template(words: Words, offer: Offer, *, follow_up: bool) -> tuple[str, bool]:
    """A wording with all required parameters and none that the tool lacks; and whether it was held out."""
    rng, family = words.rng, offer.family
    needed = required_slots(family)

    def fitting(asks: list[str]) -> list[str]:
        return [ask for ask in asks if needed <= slots_of(ask) <= offer.names.keys()]

    if follow_up and fitting(family["follow_ups"]):
        return rng.choice(fitting(family["follow_ups"])), False
    asks, held_back = fitting(family["asks"]), family["asks"][-1]
    if words.held_back and held_back in asks and rng.random() < 0.5:
        return held_back, True
    return rng.choice([ask for ask in asks if ask != held_back] or asks), False


def random_pair(words: Words, offer: Offer) -> tuple[Request, Request, str]:
    """Two requests for the same tool in one message, as in `the weather in Paris and Rome`."""
    first, second = random_request(words, offer), random_request(words, offer, follow_up=True)
    needed = required_slots(offer.family)
    only_one = len(needed) == 1 and first.spoken.keys() == second.spoken.keys() == needed
    if not only_one or words.rng.random() >= 0.7:
        return first, second, f"{first.text} {second.text}"
    one, other = (next(iter(asked.spoken.values())) for asked in (first, second))
    link = words.rng.choice([" and ", " and ", " and in ", ", ", ", and "])
    return first, second, first.text.replace(one, one + link + other, 1)


def _said(rng: random.Random, kind: str, value: Value, template: str) -> str:
    """Users sometimes quote texts and capitalize choices."""
    if kind.startswith("enum") and rng.random() < 0.2:
        return value.spoken.capitalize()
    if kind in _QUOTABLE and '"' not in template and rng.random() < 0.15:
        return rng.choice(['"{}"', "'{}'"]).format(value.spoken)
    return value.spoken


def reworded(rng: random.Random, template: str) -> str:
    """Drop a word or add a filler now and then, so that no wording is memorized."""
    words = template.split(" ")
    droppable = [place for place, word in enumerate(words) if "{" not in word]
    if rng.random() < 0.12 and len(words) > 3 and droppable:
        words.pop(rng.choice(droppable))
    if rng.random() < 0.12:
        words.insert(rng.randint(0, len(words)), rng.choice(_FILLERS))
    return " ".join(words)


def in_a_tone(rng: random.Random, template: str) -> str:
    """The same request in another tone: polite, hasty, in lower case."""
    tone = rng.random()
    opener = rng.choice(_OPENERS)
    if tone < 0.25 and not template.startswith("{"):
        return opener + (template if opener[-2] in "!?" else template[0].lower() + template[1:])
    if tone < 0.4:
        return template + rng.choice([" Thanks!", " please", " Thank you.", " Be quick.", " I need it now."])
    if tone < 0.5:
        return template.removesuffix("?").lower()
    if tone < 0.6 and (template[-1].isalpha() or template[-1] == "}"):
        return template + rng.choice([".", "!", "?"])
    return template
