"""Finds the first error of a JSON value against a type: the path of the field and what is allowed."""

import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

_KIND_NAMES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((inspect.NoneType,), "null"),
    ((inspect.BoolType,), "true or false"),
    ((inspect.IntType,), "an integer"),
    ((inspect.FloatType,), "a number"),
    ((inspect.StrType,), "a string"),
    ((inspect.ListType,), "an array"),
    ((inspect.StructType, inspect.DictType), "an object"),
)


class Fault(NamedTuple):
    """`path` is the field (empty: the value itself), `why` the error, without a full stop."""

    path: str
    why: str


@functools.cache
def type_of(cls: type) -> inspect.Type:
    """The type as `first_fault` takes it."""
    return inspect.type_info(cls)


def first_fault(value: object, expected: inspect.Type, path: str = "") -> Fault | None:  # noqa: PLR0911  a table
    """The first fault of `value`, which is parsed JSON; None if it fits."""
    match expected:
        case inspect.UnionType(types=types):
            return _in_union(value, types, path)
        case inspect.LiteralType(values=allowed):
            return None if value in allowed else _not_among(value, allowed, path)
        case inspect.StructType() if isinstance(value, dict):
            return _in_struct(value, expected, path)
        case inspect.DictType() if isinstance(value, dict):
            return _in_dict(value, expected, path)
        case inspect.ListType() if isinstance(value, list):
            return _in_list(value, expected, path)
        case inspect.StrType() if isinstance(value, str):
            return _in_text(value, expected, path)
        case inspect.IntType() | inspect.FloatType() if _is_number(value, expected):
            return _in_number(value, expected, path)
        case _:
            return None if _fits(value, expected) else _wrong_kind(value, (expected,), path)


def _fits(value: object, expected: inspect.Type) -> bool:
    """Whether null, a boolean, or any value fits the type."""
    match expected:
        case inspect.NoneType():
            return value is None
        case inspect.BoolType():
            return isinstance(value, bool)
        case _:
            return isinstance(expected, inspect.AnyType | inspect.RawType)


def _is_number(value: object, expected: inspect.Type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(expected, inspect.FloatType) or isinstance(value, int)


def _in_union(value: object, types: Iterable[inspect.Type], path: str) -> Fault | None:
    kinds = tuple(types)
    faults = [first_fault(value, kind, path) for kind in kinds]
    if None in faults:
        return None
    tagged = [kind for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag_field]
    if isinstance(value, dict) and tagged:
        return _in_tagged(value, tagged, path)
    # At most one member of a field's union has the value's JSON type: its fault is the most helpful.
    closest = (f for kind, f in zip(kinds, faults, strict=True) if has_shape(value, kind))
    return next(closest, None) or _wrong_kind(value, kinds, path)


def has_shape(value: object, kind: inspect.Type) -> bool:
    """Whether a value has the JSON type of a union's member and, if that is a tagged struct, its tag. In a
    value that fits the union, this holds for one member at most."""
    match kind:
        case inspect.StructType(tag_field=str(field)):
            return isinstance(value, dict) and value.get(field, kind.tag) == kind.tag
        case inspect.StructType() | inspect.DictType():
            return isinstance(value, dict)
        case inspect.ListType():
            return isinstance(value, list)
        case inspect.StrType() | inspect.LiteralType():
            return isinstance(value, str)
        case inspect.IntType() | inspect.FloatType():
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            return False


def _in_tagged(value: dict[str, Any], tagged: list[inspect.StructType], path: str) -> Fault | None:
    field = tagged[0].tag_field
    assert field is not None, "tagged structs have a tag field"
    for kind in tagged:
        if kind.tag == value.get(field):
            return _in_struct(value, kind, path)
    if field not in value:
        return Fault(_join(path, field), f"is missing; allowed values: {_listed(k.tag for k in tagged)}")
    return _not_among(value[field], [kind.tag for kind in tagged], _join(path, field))


def _in_struct(value: dict[str, Any], expected: inspect.StructType, path: str) -> Fault | None:
    if expected.tag_field and value.get(expected.tag_field) != expected.tag:
        return _in_tagged(value, [expected], path)
    for field in expected.fields:
        if field.encode_name in value:
            fault = first_fault(value[field.encode_name], field.type, _join(path, field.encode_name))
            if fault is not None:
                return fault
        elif field.required:
            return Fault(_join(path, field.encode_name), "is missing")
    return None


def _in_dict(value: dict[str, Any], expected: inspect.DictType, path: str) -> Fault | None:
    limit = expected.max_length
    if limit is not None and len(value) > limit:
        return Fault(path, f"has {len(value)} entries; at most {limit} are allowed")
    for key, item in value.items():
        in_key = first_fault(key, expected.key_type, path)
        if in_key is not None:
            return Fault(path, f"key {key[:40]!r} {in_key.why}")
        fault = first_fault(item, expected.value_type, _join(path, key))
        if fault is not None:
            return fault
    return None


def _in_list(value: list[Any], expected: inspect.ListType, path: str) -> Fault | None:
    fewest, most = expected.min_length or 0, expected.max_length
    if len(value) < fewest:
        return Fault(path, f"must have at least {fewest} entr{'y' if fewest == 1 else 'ies'}")
    if most is not None and len(value) > most:
        return Fault(path, f"has {len(value)} entries; at most {most} are allowed")
    faults = (first_fault(item, expected.item_type, f"{path}[{i}]") for i, item in enumerate(value))
    return next((fault for fault in faults if fault is not None), None)


def _in_text(value: str, expected: inspect.StrType, path: str) -> Fault | None:
    fewest, most = expected.min_length or 0, expected.max_length
    if len(value) < fewest:
        return Fault(path, "must not be empty" if fewest == 1 else f"must have at least {fewest} characters")
    if most is not None and len(value) > most:
        return Fault(path, f"has {len(value)} characters; at most {most} are allowed")
    if expected.pattern is not None and not re.search(expected.pattern, value):
        return Fault(path, f"must match the pattern {expected.pattern}")
    return None


def _in_number(value: Any, expected: inspect.IntType | inspect.FloatType, path: str) -> Fault | None:
    """Numbers have no bounds, or a lower (`ge` or `gt`) and an upper one (`le`)."""
    low, high = expected.gt if expected.ge is None else expected.ge, expected.le
    if low is None or high is None or (low <= value <= high and value != expected.gt):
        return None
    if expected.gt is not None:
        return Fault(path, f"must be greater than {low} and at most {high}")
    return Fault(path, f"must be between {low} and {high}")


def _not_among(value: object, allowed: Iterable[object], path: str) -> Fault:
    return Fault(path, f"must be one of {_listed(allowed)}, not {_shown(value)}")


def _wrong_kind(value: object, kinds: Iterable[inspect.Type], path: str) -> Fault:
    names = dict.fromkeys(_kind_name(kind) for kind in kinds if not isinstance(kind, inspect.NoneType))
    return Fault(path, f"must be {' or '.join(names) or 'null'}, not {_shown(value)}")


def _kind_name(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return f"one of {_listed(kind.values)}"
    return next((name for classes, name in _KIND_NAMES if isinstance(kind, classes)), "another value")


def _shown(value: object) -> str:
    """A short value as JSON, any other by its type."""
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str() if len(value) > 40:
            return f"a string of {len(value)} characters"
        case str():
            return repr(value)
        case _:
            return msgspec.json.encode(value).decode()


def _listed(values: Iterable[object]) -> str:
    return ", ".join(sorted(map(str, values)))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
