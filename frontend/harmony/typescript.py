"""Renders JSON schemas as TypeScript, byte for byte as openai-harmony does.

That includes its quirks, since the model was trained with them: `anyOf` and `$ref` are `any`, the second line
of a property's description is not commented out, enum values are quoted but not escaped, an object's
description appears above the property and again inside it.
"""

import json
from typing import Any

import msgspec

MAX_DEPTH = 100
_PLAIN = {"number": "number", "integer": "number", "boolean": "boolean"}


def type_of(schema: object, indent: str = "", *, depth: int = 0) -> str:
    """The TypeScript type of a JSON schema; `any` if there is no equivalent.

    Raises ValueError for schemas or values that are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    kind = "any"
    match schema:
        case {"oneOf": list(variants)}:
            kind = "".join([f"\n{_variant(each, _notes(each), indent, depth)}" for each in variants])
        case {"type": list(names)}:
            kind = " | ".join(_PLAIN.get(name, name) for name in names if isinstance(name, str)) or "any"
        case {"type": "object"}:
            kind = _object(schema, indent, depth)
        case {"type": "array", "items": items}:
            kind = f"{type_of(items, indent, depth=depth + 1)}[]"
        case {"type": "array"}:
            kind = "Array<any>"
        case {"type": "string", "enum": list(values)}:
            kind = " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"
        case {"type": "string"}:
            kind = "string"
        case {"type": str(name)}:
            kind = _PLAIN.get(name, "any")
    return kind


def _object(schema: Any, indent: str, depth: int) -> str:
    lines = [*_comment(schema, indent), "{"]
    properties, required = schema.get("properties"), schema.get("required")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        mark = "" if isinstance(required, list) and key in required else "?"
        lines += _property(f"{indent}{key}{mark}:", value if isinstance(value, dict) else {}, indent, depth)
    return "\n".join([*lines, indent + "}"])


def _property(name: str, schema: dict[str, Any], indent: str, depth: int) -> list[str]:
    """The lines of one property: comments, `name: type,`, default."""
    lines = []
    if isinstance(title := schema.get("title"), str):
        lines += [f"{indent}// {title}", f"{indent}//"]
    if "oneOf" not in schema:
        lines += _comment(schema, indent)
    if isinstance(examples := schema.get("examples"), list) and examples:
        listed = [f'{indent}// - "{example}"' for example in examples if isinstance(example, str)]
        lines += [f"{indent}// Examples:", *listed]
    if isinstance(variants := schema.get("oneOf"), list):
        return lines + _union(name, schema, variants, indent, depth)
    default = f" // default: {_default(schema)}" if "default" in schema and "oneOf" not in schema else ""
    return [*lines, f"{name} {_nullable_type(schema, indent + '    ', depth)},{default}"]


def _union(name: str, schema: dict[str, Any], variants: list[Any], indent: str, depth: int) -> list[str]:
    """A union has one line per variant; a description repeated by the first variant is written once."""
    description = schema.get("description")
    is_of_first = bool(variants) and description == _get(variants[0], "description")
    above = [] if is_of_first else _comment(schema, indent)
    lines = [*above, *([f"{indent}// default: {_default(schema)}"] if "default" in schema else ()), name]
    for i, variant in enumerate(variants):
        notes = []
        own = _get(variant, "description")
        if isinstance(own, str) and own != description and not (i == 0 and above):
            notes.append(own)
        if isinstance(variant, dict) and "default" in variant:
            notes.append(f"default: {_default(variant)}")
        lines.append(_variant(variant, notes, indent, depth))
    return [*lines, f"{indent},"]


def _notes(variant: object) -> list[str]:
    """The notes of a variant of a union that is not a property."""
    notes = [note for note in [_get(variant, "description")] if isinstance(note, str)]
    if isinstance(variant, dict) and "default" in variant:
        default = variant["default"]
        quoted = isinstance(default, str) and not variant.get("enum")
        notes.append(f'default: "{default}"' if quoted else f"default: {compact_json(default)}")
    return notes


def _variant(variant: object, notes: list[str], indent: str, depth: int) -> str:
    trailing = f" // {' '.join(notes)}" if notes else ""
    return f"{indent} | {_nullable_type(variant, indent + '   ', depth)}{trailing}"


def _nullable_type(schema: object, indent: str, depth: int) -> str:
    text = type_of(schema, indent, depth=depth + 1)
    return f"{text} | null" if _get(schema, "nullable") is True and "null" not in text else text


def _default(schema: dict[str, Any]) -> str:
    """A string default is quoted, unless it names an enum value."""
    default, enum = schema["default"], schema.get("enum")
    if not isinstance(default, str):
        return compact_json(default)
    return default if isinstance(enum, list) and enum else f'"{default}"'


def _comment(schema: dict[str, Any], indent: str) -> list[str]:
    description = schema.get("description")
    return [f"{indent}// {description}"] if isinstance(description, str) else []


def _get(schema: object, key: str) -> object:
    return schema.get(key) if isinstance(schema, dict) else None


def compact_json(value: object) -> str:
    """JSON without spaces, as serde_json writes it; lone surrogates are kept.

    Raises ValueError for values nested too deeply.
    """
    try:
        return _json(value)
    except RecursionError as error:
        raise ValueError("a value is nested too deeply") from error


def _json(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()  # writes numbers as serde_json does, 1e20 and not 1e+20
    except UnicodeEncodeError:  # a lone surrogate; the tokenizer replaces it
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
