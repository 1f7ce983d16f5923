"""Renders JSON schemas as TypeScript, byte for byte as openai-harmony does.

That includes its quirks, since the model was trained with them: `anyOf` and `$ref` are `any`, the second line
of a property's description is not commented out, enum values are quoted but not escaped, an object's
description appears above the property and again inside it.
"""

import json

import msgspec

MAX_DEPTH = 100
_PLAIN = {"number": "number", "integer": "number", "boolean": "boolean"}


def type_of(schema: object, indent: str = "", *, depth: int = 0) -> str:
    """The TypeScript type of a JSON schema; `any` if there is no equivalent.

    Raises ValueError for schemas or values that are nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        return "any"
    variants = schema.get("oneOf")
    if isinstance(variants, list):
        return "".join(_variant(variant, indent, depth) for variant in variants)
    declared = schema.get("type")
    if isinstance(declared, list):
        return " | ".join(_PLAIN.get(name, name) for name in declared if isinstance(name, str)) or "any"
    if not isinstance(declared, str):
        return "any"
    shape = _SHAPES.get(declared)
    return shape(schema, indent, depth) if shape else _PLAIN.get(declared, "any")


def _array(schema: dict[str, object], indent: str, depth: int) -> str:
    return f"{type_of(schema['items'], indent, depth=depth + 1)}[]" if "items" in schema else "Array<any>"


def _object(schema: dict[str, object], indent: str, depth: int) -> str:
    lines = [*_comment(schema.get("description"), indent), "{"]
    properties = schema.get("properties")
    required = schema.get("required")
    if isinstance(properties, dict):
        for key, value in properties.items():
            mark = "" if isinstance(required, list) and key in required else "?"
            lines += _property(f"{indent}{key}{mark}:", value, indent, depth)
    lines.append(indent + "}")
    return "\n".join(lines)


def _property(name: str, value: object, indent: str, depth: int) -> list[str]:
    """The lines of one property: comments, `name: type,`, default."""
    schema = value if isinstance(value, dict) else {}
    lines = []
    if isinstance(schema.get("title"), str):
        lines += [f"{indent}// {schema['title']}", f"{indent}//"]
    if "oneOf" not in schema:
        lines += _comment(schema.get("description"), indent)
    lines += _examples(schema.get("examples"), indent)
    if isinstance(schema.get("oneOf"), list):
        return lines + _one_of_property(name, schema, indent, depth)
    line = f"{name} {_nullable_type(schema, indent + '    ', depth)},"
    if "default" in schema and "oneOf" not in schema:
        line += f" // default: {_default(schema)}"
    return [*lines, line]


def _one_of_property(name: str, schema: dict[str, object], indent: str, depth: int) -> list[str]:
    """A union has one line per variant; a description repeated by the first variant is written once."""
    variants = schema["oneOf"]
    assert isinstance(variants, list)
    description = schema.get("description")
    is_of_first = bool(variants) and description == _get(variants[0], "description")
    above = [] if is_of_first else _comment(description, indent)
    lines = list(above)
    if "default" in schema:
        lines.append(f"{indent}// default: {_default(schema)}")
    lines.append(name)
    for i, variant in enumerate(variants):
        notes = []
        own = _get(variant, "description")
        if isinstance(own, str) and own != description and not (i == 0 and above):
            notes.append(own)
        if isinstance(variant, dict) and "default" in variant:
            notes.append(f"default: {_default(variant)}")
        lines.append(f"{indent} | {_nullable_type(variant, indent + '   ', depth)}{_trailing(notes)}")
    return [*lines, f"{indent},"]


def _variant(variant: object, indent: str, depth: int) -> str:
    """One line of a union that is not a property."""
    notes = []
    description = _get(variant, "description")
    if isinstance(description, str):
        notes.append(description)
    if isinstance(variant, dict) and "default" in variant:
        default = variant["default"]
        quoted = isinstance(default, str) and not variant.get("enum")
        notes.append(f'default: "{default}"' if quoted else f"default: {compact_json(default)}")
    return f"\n{indent} | {_nullable_type(variant, indent + '   ', depth)}{_trailing(notes)}"


def _nullable_type(schema: object, indent: str, depth: int) -> str:
    text = type_of(schema, indent, depth=depth + 1)
    if _get(schema, "nullable") is True and "null" not in text:
        return f"{text} | null"
    return text


def _default(schema: dict[str, object]) -> str:
    """A string default is quoted, unless it names an enum value."""
    default = schema["default"]
    if not isinstance(default, str):
        return compact_json(default)
    enum = schema.get("enum")
    return default if isinstance(enum, list) and enum else f'"{default}"'


def _string(schema: dict[str, object], _indent: str, _depth: int) -> str:
    values = schema.get("enum")
    if not isinstance(values, list):
        return "string"
    return " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"


def _comment(text: object, indent: str) -> list[str]:
    return [f"{indent}// {text}"] if isinstance(text, str) else []


def _examples(examples: object, indent: str) -> list[str]:
    if not isinstance(examples, list) or not examples:
        return []
    listed = [f'{indent}// - "{example}"' for example in examples if isinstance(example, str)]
    return [f"{indent}// Examples:", *listed]


def _trailing(notes: list[str]) -> str:
    return f" // {' '.join(notes)}" if notes else ""


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


_SHAPES = {"object": _object, "array": _array, "string": _string}
