"""Tools to offer, requests for them and their results: random, from the families of `demo_domains.yaml`."""

import functools
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from frontend.harmony.conversation import Tool
from tools.demo_values import Value, random_value
from tools.demo_words import ADJECTIVES, NOUNS, VERBS, Words

Family = dict[str, Any]
# Families that answer the same question: never offered together.
_CONFUSABLE = ({"calculator", "add"}, {"calculator", "multiply"}, {"query_database", "run_sql"}, {"set_timer", "set_reminder"},
               {"search", "get_news"}, {"search", "define_word"})  # fmt: skip
_TYPES = {"int": "integer", "num": "number", "bool": "boolean"}
_GENERIC_KINDS = [
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
# Optional parameters that nobody asks for.
_UNUSED_SCHEMAS: list[dict[str, object]] = [
    {"type": "boolean", "description": "Optional switch"},
    {"type": "array", "items": {"type": "string"}},
    {
        "type": "object",
        "properties": {"page": {"type": "integer"}, "order": {"type": "string", "enum": ["asc", "desc"]}},
    },
    {"type": ["string", "null"], "description": "May be null"},
    {"type": "integer", "default": 10},
    {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
    {"type": "number"},
]


class Offer(NamedTuple):
    """A tool as offered, with what is needed to ask for it: `names` are the parameters by the family's key."""

    tool: Tool
    family: Family
    names: dict[str, str]
    as_text: frozenset[str]


class Request(NamedTuple):
    """One wish of the user that the tool of `offer` fulfils; `spoken` fills the family's templates."""

    offer: Offer
    text: str
    goal: str
    arguments: dict[str, object]
    spoken: dict[str, str]
    is_new_wording: bool


class Outcome(NamedTuple):
    """What the tool returned: as text, as facts (name, value) and as the answer a user would like."""

    text: str
    facts: tuple[tuple[str, str], ...]
    answer: str


@functools.cache
def families() -> list[Family]:
    """Every family of the file; `key` is its first tool name."""
    loaded: list[Family] = yaml.safe_load(Path(__file__).with_name("demo_domains.yaml").read_text())
    for family in loaded:
        family["key"] = family["names"][0] + ("" if family["params"] else "()")
    return loaded


def slots_of(template: str) -> set[str]:
    return set(re.findall(r"{(\w+)}", template))


def confusable(one: Family, other: Family) -> bool:
    return one["key"] == other["key"] or any({one["key"], other["key"]} == pair for pair in _CONFUSABLE) or (
        one["key"].removesuffix("()") == other["key"].removesuffix("()")
    )  # fmt: skip


def generic_family(words: Words) -> Family:
    """A family nobody has seen: a verb, a noun and parameters with random names, so that names must be read."""
    rng = words.rng
    noun, verb = words.pick(NOUNS, 0.1), words.pick(VERBS, 0.05)
    taken = rng.sample([n for n in NOUNS if n != noun], 4)
    keys = [rng.choice([f"{noun}_id", "id", noun, "name", f"{noun}_name"]), *taken[: rng.randint(0, 2)]]
    params = {
        key: _generic_param(words, key, required=i == 0 or rng.random() < 0.3) for i, key in enumerate(keys)
    }
    if rng.random() < 0.35:
        field = taken[3]
        names = [f"get_{noun}_{field}", f"{noun}_{field}", f"lookup_{field}", f"fetch_{noun}_{field}"]
        about = [
            f"Returns the {field} of a {noun}",
            f"Get the {field} of the {noun}",
            f"{field.capitalize()} lookup for {noun}s",
        ]
        heads = [f"What is the {field} of the {noun} {{{keys[0]}}}", f"Get the {field} for {noun} {{{keys[0]}}}",
                 f"I need the {field} of {noun} {{{keys[0]}}}", f"Tell me the {field} of {noun} {{{keys[0]}}}"]  # fmt: skip
        goal = f"the {field} of {noun} {{{keys[0]}}}"
        result = {field: _generic_kind(words)}
        answers = [f"The {field} of {noun} {{{keys[0]}}} is {{{field}}}.", f"The {field} is {{{field}}}."]
    else:
        names = [f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"do_{verb}_{noun}"]
        about = [
            f"{verb.capitalize()} a {noun}",
            f"{verb.capitalize()}s the given {noun}",
            f"Use this to {verb} a {noun}.",
            "",
        ]
        heads = [f"{verb.capitalize()} the {noun} {{{keys[0]}}}", f"Please {verb} {noun} {{{keys[0]}}}",
                 f"I want to {verb} the {noun} {{{keys[0]}}}", f"Can you {verb} {noun} {{{keys[0]}}}"]  # fmt: skip
        goal = f"to {verb} the {noun} {{{keys[0]}}}"
        result = {
            "status|state|result": f"enum:{rng.choice(['done|ok|success', words.pick(ADJECTIVES), 'pending|queued'])}"
        }
        if rng.random() < 0.5:
            result[taken[2]] = _generic_kind(words)
        answers = [
            f"Done: the {noun} {{{keys[0]}}} has the status {{status}}.",
            f"The status of {noun} {{{keys[0]}}} is {{status}}.",
        ]
        answers = [f"{a} The {taken[2]} is {{{taken[2]}}}." if taken[2] in result else a for a in answers]
    asks = [
        head + "".join(_mention(rng, key) for key in chosen)
        for head in heads
        for chosen in _subsets(rng, keys[1:], params)
    ]
    return {"key": names[0], "names": names, "about": about, "goal": [goal], "params": params, "asks": asks,
            "follow_ups": [f"And {noun} {{{keys[0]}}}?"], "outcomes": [{"result": result, "answers": answers}]}  # fmt: skip


def _subsets(rng: random.Random, keys: list[str], params: dict[str, Any]) -> list[list[str]]:
    needed = [key for key in keys if params[key]["required"]]
    return [needed, rng.sample(keys, len(keys))]


def _mention(rng: random.Random, key: str) -> str:
    word = key.replace("_", " ")
    return rng.choice([f" with {word} {{{key}}}", f", {word} {{{key}}}", f", {word}: {{{key}}}", f" and {word} {{{key}}}",
                       f" with the {word} {{{key}}}", f" ({word} = {{{key}}})"])  # fmt: skip


def _generic_kind(words: Words) -> str:
    kind = words.rng.choice(_GENERIC_KINDS)
    return (
        "enum:" + "|".join(words.pick(ADJECTIVES) for _ in range(words.rng.randint(2, 4)))
        if kind == "enum"
        else kind
    )


def _generic_param(words: Words, key: str, *, required: bool) -> dict[str, Any]:
    return {"names": [key], "kind": "id" if required and words.rng.random() < 0.5 else _generic_kind(words), "required": required,
            "about": ["", f"The {key.replace('_', ' ')}", f"{key.replace('_', ' ').capitalize()} to use"]}  # fmt: skip


def offer(words: Words, family: Family) -> Offer:
    """A tool of the family: name, description, parameters and schema vary."""
    rng = words.rng
    names, as_text, properties, required = {}, set(), {}, []
    shown = [key for key, param in family["params"].items() if param.get("required") or rng.random() < 0.6]
    if rng.random() < 0.3:
        rng.shuffle(shown)
    for key in shown:
        param = family["params"][key]
        name = rng.choice([n for n in param["names"] if n not in names.values()] or [key])
        schema = _schema(rng, param)
        if param["kind"].startswith("int") and rng.random() < 0.15:
            schema["type"] = "string"
            as_text.add(key)
        names[key], properties[name] = name, schema
        if param.get("required"):
            required.append(name)
    if rng.random() < 0.12:
        properties |= {words.pick(NOUNS): rng.choice(_UNUSED_SCHEMAS)}
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.3:
        parameters["required"] = required
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    description = rng.choice(family["about"]) or None
    no_schema = not properties and rng.random() < 0.1
    tool = Tool(
        name=_styled(rng, rng.choice(family["names"])),
        description=description,
        parameters=None if no_schema else parameters,
    )
    return Offer(tool, family, names, frozenset(as_text))


def _schema(rng: random.Random, param: dict[str, Any]) -> dict[str, object]:
    kind = param["kind"].partition(":")[0]
    schema: dict[str, object] = {"type": _TYPES.get(kind, "string")}
    if kind in ("numbers", "people"):
        schema = {"type": "array", "items": {"type": "number" if kind == "numbers" else "string"}}
    if kind == "enum":
        schema["enum"] = param["kind"].partition(":")[2].split("|")
    about = rng.choice(param["about"])
    return schema | ({"description": about} if about else {})


def _styled(rng: random.Random, name: str) -> str:
    style = rng.random()
    parts = name.split("_")
    if style < 0.1:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    if style < 0.14:
        return "".join(part.capitalize() for part in parts)
    if style < 0.18:
        return f"{name}{rng.choice(['_v2', '_tool', '2', '_api'])}"
    return name.replace("_", "-") if style < 0.2 else name


def request(words: Words, of: Offer, *, follow_up: bool = False) -> Request:
    """Somebody asks for what the tool does, with the arguments in the sentence."""
    rng, family = words.rng, of.family
    needed = {key for key, param in family["params"].items() if param.get("required")}
    asks = (
        [ask for ask in family["follow_ups"] if needed <= slots_of(ask) <= of.names.keys()]
        if follow_up
        else []
    )
    follow_up, asks = bool(asks), asks or family["asks"]
    fitting = [ask for ask in asks if needed <= slots_of(ask) <= of.names.keys()]
    new_wording = words.held_back and not follow_up and asks[-1] in fitting and rng.random() < 0.5
    template = (
        asks[-1]
        if new_wording
        else rng.choice([ask for ask in fitting if follow_up or ask != asks[-1]] or fitting)
    )
    values = {
        key: random_value(words, family["params"][key]["kind"]) for key in of.names if key in slots_of(template)
    }
    arguments = {of.names[key]: str(v.json) if key in of.as_text else v.json for key, v in values.items()}
    spoken = {
        key: _said(rng, family["params"][key]["kind"], value, template) for key, value in values.items()
    }
    goal = rng.choice([goal for goal in family["goal"] if slots_of(goal) <= spoken.keys()])
    plain = {key: value.spoken for key, value in values.items()}
    return Request(
        of, style(rng, template).format(**spoken), goal.format(**plain), arguments, plain, new_wording
    )


def request_pair(words: Words, of: Offer) -> tuple[Request, Request, str]:
    """Two wishes for the same tool in one message, as in `the weather in Paris and Rome`."""
    first, second = request(words, of), request(words, of, follow_up=True)
    needed = [key for key, param in of.family["params"].items() if param.get("required")]
    joined = f"{first.text} {second.text}"
    if (
        len(needed) == 1
        and first.spoken.keys() == second.spoken.keys() == set(needed)
        and words.rng.random() < 0.7
    ):
        one, other = first.spoken[needed[0]], second.spoken[needed[0]]
        joined = first.text.replace(
            one, one + words.rng.choice([" and ", " and ", " and in ", ", ", ", and "]) + other, 1
        )
    return first, second, joined


def _said(rng: random.Random, kind: str, value: Value, template: str) -> str:
    """Users put quotes around texts and capitals on choices as they like."""
    if kind.startswith("enum") and rng.random() < 0.2:
        return value.spoken.capitalize()
    if (
        kind in ("phrase", "title", "noun", "path", "markdown", "sql", "sentence")
        and '"' not in template
        and rng.random() < 0.15
    ):
        return rng.choice(['"{}"', "'{}'"]).format(value.spoken)
    return value.spoken


def style(rng: random.Random, template: str) -> str:
    """The same wish in another tone: polite, hasty, in small letters."""
    tone = rng.random()
    opener = rng.choice(
        [
            "Hey, ",
            "Hi! ",
            "Please ",
            "Quick question: ",
            "Hello, ",
            "Hey, quick check: ",
            "OK, ",
            "Can you help me? ",
            "So, ",
        ]
    )
    if tone < 0.25 and not template.startswith("{"):
        template = opener + (template if opener[-2] in "!?" else template[0].lower() + template[1:])
    elif tone < 0.4:
        template += rng.choice([" Thanks!", " please", " Thank you.", " Be quick.", " I need it now."])
    elif tone < 0.5:
        template = template.removesuffix("?").lower()
    elif tone < 0.6 and (template[-1].isalpha() or template[-1] == "}"):
        template += rng.choice([".", "!", "?"])
    return template


def outcome(words: Words, asked: Request) -> Outcome:
    """The tool's result for this request, in the many shapes in which tools return results."""
    rng = words.rng
    if rng.random() < 0.05:
        return _failure(words, asked)
    chosen = rng.choice(asked.offer.family["outcomes"])
    fields: dict[str, object] = {}
    said = dict(asked.spoken)
    for spec, kind in chosen["result"].items():
        slot, name = spec.split("|")[0], rng.choice(spec.split("|"))
        value = _result_value(words, kind, asked)
        fields[name] = value
        said[slot] = json.dumps(value) if isinstance(value, bool) else str(value)
    answer = rng.choice(chosen["answers"]).format(**said)
    facts = tuple((name, json.dumps(v) if isinstance(v, bool) else str(v)) for name, v in fields.items())
    if rng.random() < 0.15:
        answer = _plain_answer(facts)
    if rng.random() < 0.25:
        fields[rng.choice(NOUNS)] = random_value(words, _generic_kind(words)).json
    return Outcome(_result_text(rng, fields), facts, answer)


def _result_value(words: Words, kind: str, asked: Request) -> object:
    if kind.startswith("="):
        return json.loads(kind[1:])
    return asked.spoken[kind[1:]] if kind.startswith("@") else random_value(words, kind).json


def _failure(words: Words, asked: Request) -> Outcome:
    reason = words.rng.choice(
        ["not found", "timeout", "permission denied", "service unavailable", words.phrase(), "invalid input"]
    )
    answer = words.rng.choice(["I am sorry, {} failed: {}.", "That did not work: {} says {}."]).format(
        asked.offer.tool.name, reason
    )
    return Outcome(json.dumps({"error": reason}, separators=(",", ":")), (("error", reason),), answer)


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
    compact = rng.random() < 0.6
    return json.dumps(
        wrapped,
        separators=(",", ":") if compact else None,
        ensure_ascii=False,
        indent=2 if shape > 0.96 else None,
    )
