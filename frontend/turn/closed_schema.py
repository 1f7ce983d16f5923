"""Closes JSON schemas for `strict`: objects may have only the properties that they list, on every engine."""

from collections.abc import Mapping
from typing import Any

# Keywords that hold subschemas by name, in a list, or singly. `allOf` is left out: members closed
# individually would reject each other's properties.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_LIST = frozenset({"anyOf", "oneOf", "prefixItems"})
_ONE = frozenset({"items", "additionalProperties"})
_OPEN = frozenset({"allOf", "additionalProperties", "unevaluatedProperties", "patternProperties"})


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` added to every object that lists its properties and does
    not already say how to treat others. Raises RecursionError for schemas nested too deeply."""
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _closed_inside(key, value) for key, value in schema.items()}
    if "properties" in made and not _OPEN & made.keys():
        made["additionalProperties"] = False
    return made


def _closed_inside(key: str, value: Any) -> Any:
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: closed(inner) for name, inner in value.items()}
    if key in _IN_LIST and isinstance(value, list):
        return [closed(inner) for inner in value]
    return closed(value) if key in _ONE else value
