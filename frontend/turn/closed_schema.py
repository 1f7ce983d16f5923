"""A JSON schema whose objects have no properties but those it names: what `strict` means, in every engine."""

from collections.abc import Mapping
from typing import Any

# Where JSON Schema has schemas by name, in a list, or one. Not in `allOf` and the like: members that are
# closed each for itself would exclude one another.
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_LIST = frozenset({"anyOf", "oneOf", "prefixItems"})
_ONE = frozenset({"items", "additionalProperties"})
_OPEN = frozenset({"allOf", "additionalProperties", "unevaluatedProperties", "patternProperties"})


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object's properties are listed and it does
    not say otherwise. Raises RecursionError for one that is nested too deeply."""
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
