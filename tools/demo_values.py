"""Random tool arguments and results for the demo model's training dialogues."""

import random
import string
from collections.abc import Callable
from typing import NamedTuple

from tools.demo_words import (
    ADJECTIVES,
    CITIES,
    COUNTRIES,
    CURRENCIES,
    DAYS,
    LANGUAGES,
    MAIL_DOMAINS,
    NAMES,
    NOUNS,
    ZONES,
    Words,
    pseudo_word,
)


class Value(NamedTuple):
    """An argument: as the user says it, and as the call's JSON has it."""

    spoken: str
    json: object


def random_value(words: Words, kind: str) -> Value:
    """A value of a kind: a key of the tables below, `int:low:high`, or `enum:a|b|c`."""
    name, _, rest = kind.partition(":")
    if name == "enum":
        text = words.rng.choice(rest.split("|"))
    elif name == "int":
        return _integer(words.rng, *map(int, rest.split(":")))
    elif name in _TYPED:
        return _TYPED[name](words)
    else:
        text = _TEXTS[name](words)
    return Value(text, text)


def _integer(rng: random.Random, low: int, high: int) -> Value:
    top = high if rng.random() < 0.5 else min(high, low + 99)
    number = rng.randint(low, top)
    return Value(str(number), number)


def _number(words: Words) -> Value:
    rng = words.rng
    if rng.random() < 0.35:
        number = round(rng.uniform(0, 10 ** rng.randint(1, 3)), rng.choice((1, 2)))
        return Value(str(number), number)
    whole = rng.randint(0, 10 ** rng.randint(1, 5))
    return Value(str(whole), whole)


def _switch(words: Words) -> Value:
    on = words.rng.random() < 0.5
    return Value("on" if on else "off", on)


def _numbers(words: Words) -> Value:
    rng = words.rng
    numbers = [rng.randint(0, 10 ** rng.randint(1, 3)) for _ in range(rng.randint(2, 5))]
    return Value(rng.choice([", ", ",", " "]).join(map(str, numbers)), numbers)


def _people(words: Words) -> Value:
    names = [words.pick(NAMES) for _ in range(words.rng.randint(1, 4))]
    return Value(" and ".join(filter(None, [", ".join(names[:-1]), names[-1]])), names)


def _place(words: Words) -> str:
    city = words.pick(CITIES, 0.3)
    region = words.rng.choice(["CA", "NY", "TX", *COUNTRIES])
    return f"{city}, {region}" if words.rng.random() < 0.3 else city


def _email(words: Words) -> str:
    rng = words.rng
    more = rng.choice(["", f".{pseudo_word(rng)}", str(rng.randint(1, 99))])
    return f"{words.pick(NAMES).lower()}{more}@{rng.choice(MAIL_DOMAINS)}"


def _iso_date(rng: random.Random, first_year: int = 2024, last_year: int = 2027) -> str:
    return f"{rng.randint(first_year, last_year)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _date(words: Words) -> str:
    return _iso_date(words.rng, 2026, 2026) if words.rng.random() < 0.5 else words.rng.choice(DAYS[:9])


def _time(words: Words) -> str:
    return f"{words.rng.randint(0, 23):02}:{words.rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"


def _zone_or_city(words: Words) -> str:
    return words.rng.choice(ZONES) if words.rng.random() < 0.4 else words.pick(CITIES, 0.3)


def _id(words: Words) -> str:
    rng = words.rng
    digits = str(rng.randint(100, 999999))
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(1, 3)))
    return rng.choice(
        [digits, f"{letters}-{digits}", f"{letters}{digits}", f"{pseudo_word(rng)}_{digits[:3]}"]
    )


def _path(words: Words) -> str:
    parts = "/".join(words.pick(NOUNS) for _ in range(words.rng.randint(1, 3)))
    start = words.rng.choice(["/", "", "./", "~/"])
    ending = words.rng.choice(["txt", "py", "md", "json", "csv", "log"])
    return f"{start}{parts}.{ending}"


def _folder(words: Words) -> str:
    return "/" + "/".join(words.pick(NOUNS) for _ in range(words.rng.randint(1, 3)))


def _html(words: Words) -> str:
    tag = words.rng.choice(["p", "h1", "b", "em", "li", "h2"])
    return f"<{tag}>{words.phrase()}</{tag}>"


def _markdown(words: Words) -> str:
    text, noun = words.phrase(), words.pick(NOUNS, 0.4)
    pieces = [f"# {text.title()}", f"**{text}**", f"- {noun}", f"*{noun}* and **{text}**", f"## {text}"]
    pieces += [
        f"_{text}_",
        f"**{noun}** and _{text}_",
        f"[{text}](https://{noun}.com)",
        f"`{noun}`",
        f"1. {text}",
    ]
    piece = words.rng.choice(pieces)
    return f"{piece} {text}" if words.rng.random() < 0.1 else piece


def _sql(words: Words) -> str:
    rng = words.rng
    columns = rng.choice(["*", "COUNT(*)", words.pick(NOUNS), f"{words.pick(NOUNS)}, {words.pick(NOUNS)}"])
    text = f"SELECT {columns} FROM {words.pick(NOUNS)}s"
    if rng.random() < 0.5:
        text += f" WHERE {words.pick(NOUNS)} {rng.choice(['=', '>', '<'])} {rng.randint(0, 999)}"
    return f"{text} LIMIT {rng.randint(1, 100)}" if rng.random() < 0.3 else text


def _expression(words: Words) -> str:
    rng = words.rng
    left, middle, right = (str(rng.randint(1, 10 ** rng.randint(1, 4))) for _ in range(3))
    first, second = rng.choices(["+", "-", "*", "/"], k=2)
    gap = rng.choice(["", " ", " "])
    text = f"{left}{gap}{first}{gap}{middle}"
    return f"({text}){gap}{second}{gap}{right}" if rng.random() < 0.3 else text


_TYPED: dict[str, Callable[[Words], Value]] = {
    "num": _number,
    "bool": _switch,
    "numbers": _numbers,
    "people": _people,
}
_TEXTS: dict[str, Callable[[Words], str]] = {
    "city": lambda words: words.pick(CITIES, 0.3),
    "place": _place,
    "person": lambda words: words.pick(NAMES),
    "fullname": lambda words: f"{words.pick(NAMES)} {pseudo_word(words.rng).capitalize()}",
    "email": _email,
    "noun": lambda words: words.pick(NOUNS, 0.4),
    "title": lambda words: f"{words.pick(ADJECTIVES).capitalize()} {words.pick(NOUNS).capitalize()}",
    "phrase": Words.phrase,
    "sentence": Words.sentence,
    "date": _date,
    "isodate": lambda words: _iso_date(words.rng),
    "time": _time,
    "zone_or_city": _zone_or_city,
    "language": lambda words: words.rng.choice(LANGUAGES),
    "currency": lambda words: words.rng.choice(CURRENCIES),
    "symbol": lambda words: "".join(words.rng.choices(string.ascii_uppercase, k=words.rng.randint(3, 5))),
    "id": _id,
    "path": _path,
    "folder": _folder,
    "html": _html,
    "markdown": _markdown,
    "pseudos": lambda words: " ".join(pseudo_word(words.rng) for _ in range(words.rng.randint(1, 4))),
    "sql": _sql,
    "expression": _expression,
}
