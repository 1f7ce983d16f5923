"""Tools as a client offers them: names, descriptions and schemas vary within a family."""

import random
from typing import Any, NamedTuple

from frontend.harmony.conversation import Tool
from tools.demo_families import Family
from tools.demo_words import NOUNS, Words

_TYPES = {"int": "integer", "num": "number", "bool": "boolean"}
# Optional parameters that no request uses.
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
    """An offered tool and how to ask for it: `names` maps the family's keys to parameter names."""

    tool: Tool
    family: Family
    names: dict[str, str]
    as_text: frozenset[str]


def random_offer(words: Words, family: Family) -> Offer:
    """A tool of the family."""
    rng = words.rng
    names: dict[str, str] = {}
    properties: dict[str, object] = {}
    as_text: set[str] = set()
    for key in _shown(rng, family["params"]):
        param = family["params"][key]
        name = rng.choice([n for n in param["names"] if n not in names.values()] or [key])
        schema = _schema(rng, param)
        if param["kind"].startswith("int") and rng.random() < 0.15:
            schema["type"] = "string"
            as_text.add(key)
        names[key], properties[name] = name, schema
    required = [name for key, name in names.items() if family["params"][key].get("required")]
    if rng.random() < 0.12:
        properties |= {words.pick(NOUNS): rng.choice(_UNUSED_SCHEMAS)}
    parameters = _parameters(rng, properties, required)
    description = rng.choice(family["about"]) or None
    no_schema = not properties and rng.random() < 0.1
    name = _styled(rng, rng.choice(family["names"]))
    tool = Tool(name=name, description=description, parameters=None if no_schema else parameters)
    return Offer(tool, family, names, frozenset(as_text))


def _shown(rng: random.Random, params: dict[str, Any]) -> list[str]:
    shown = [key for key, param in params.items() if param.get("required") or rng.random() < 0.6]
    if rng.random() < 0.3:
        rng.shuffle(shown)
    return shown


def _parameters(rng: random.Random, properties: dict[str, object], required: list[str]) -> dict[str, object]:
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.3:
        parameters["required"] = required
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    return parameters


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
