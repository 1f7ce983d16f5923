"""Decodes and validates request bodies: errors name the field, unknown fields are reported."""

import asyncio
import codecs
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from baton.errors import BatonError, InvalidRequest
from frontend.turn.fields import Refused

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)
T = TypeVar("T")

LONG_BYTES = 8192
MAX_EXPLAINED_BYTES = 1 << 20
"""A longer body gets the library's error: decoding it without types would hold up running streams."""

MAX_UNKNOWN = 1000
"""Unknown fields that are named; a body may have many more."""

# A surrogate pair, a lone surrogate, or any other escape, so that an escaped backslash is passed over.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


async def read(raw: bytes, reading: Callable[[bytes], T]) -> T:
    """What `reading` makes of a body, in a thread if it is long, so that running streams do not stall."""
    return await asyncio.to_thread(reading, raw) if len(raw) > LONG_BYTES else reading(raw)


def decode(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    """The validated body, and the sorted paths of its unknown fields, or of some if there are many.

    A struct may have class variables: `refused` (see `Refused`), `hints`, fields accepted with any value and
    without effect, and `deep`, fields that are searched for unknown fields inside.

    Raises InvalidRequest for invalid or unsupported fields; `param` is the path, as in `messages[0].role`.
    Raises TooManyParts.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if not raw or raw.isspace():
        raise InvalidRequest("The body is empty; send a JSON object.")
    check_parts(raw)
    try:
        return _decoded(raw, body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        whole = _without_lone_surrogates(raw)
        if whole != raw:
            return decode(whole, body_type)
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The JSON body is nested too deeply.") from None


def _decoded(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        _refuse(fields, body_type)
        unknown = islice(_unknown(fields, body_type), MAX_UNKNOWN)
        return msgspec.json.decode(raw, type=body_type), tuple(sorted(unknown))
    except msgspec.ValidationError as error:
        refusal = InvalidRequest(f"The JSON body is invalid: {error}.")
        if len(raw) > MAX_EXPLAINED_BYTES:
            raise refusal from None
        raise invalid(msgspec.json.decode(raw), body_type) or refusal from None


def invalid(value: object, expected: type, path: str = "") -> InvalidRequest | None:
    """The error for a JSON value that does not fit a type; `path` is its place in the body."""
    fault = first_fault(value, type_of(expected), path)
    if fault is None:
        return None
    if not fault.path:
        return InvalidRequest("The body must be a JSON object.")
    separator = "" if fault.why.startswith("is missing") else ":"
    return InvalidRequest(f"`{fault.path}`{separator} {fault.why}.", param=fault.path)


def _without_lone_surrogates(raw: bytes) -> bytes:
    """The body with U+FFFD for each lone surrogate, which clients send when they truncate text."""
    whole = bytearray(raw)
    for escape in _ESCAPE.finditer(raw):
        if escape[1]:
            whole[slice(*escape.span())] = rb"\ufffd"
    return bytes(whole)


def _unknown(fields: Mapping[str, msgspec.Raw], body_type: type) -> dict[str, None]:
    """Paths of unknown fields without list indices, as in `tools[].name`."""
    expected = type_of(body_type)
    assert isinstance(expected, inspect.StructType), "bodies are structs"
    unknown = dict.fromkeys(name for name in fields if name not in _defined(body_type))
    searched = fields.keys() & getattr(body_type, "deep", ())
    for field in expected.fields if searched else ():
        if field.encode_name in searched:
            value = msgspec.json.decode(fields[field.encode_name])
            _search(value, field.type, field.encode_name, field.encode_name, unknown)
    return unknown


def _search(value: object, expected: inspect.Type, path: str, label: str, unknown: dict[str, None]) -> None:
    """Adds the unknown fields inside a value to `unknown`. `path` is the place of the value, as in
    `tools[0]`, `label` is the same without indices."""
    match expected:
        case inspect.UnionType(types=kinds):
            for kind in kinds:
                if has_shape(value, kind):
                    _search(value, kind, path, label, unknown)
        case inspect.ListType(item_type=kind) if isinstance(value, list):
            label += "[]"
            for i, item in enumerate(value):
                _search(item, kind, f"{path}[{i}]", label, unknown)
        case inspect.StructType() if isinstance(value, dict):
            _refuse(value, expected.cls, f"{path}.")
            unknown.update(dict.fromkeys(f"{label}.{n}" for n in value if n not in _defined(expected.cls)))
            for field in expected.fields:
                name = field.encode_name
                if name in value:
                    _search(value[name], field.type, f"{path}.{name}", f"{label}.{name}", unknown)


def _refuse(fields: Mapping[str, object], struct: type, path: str = "") -> None:
    """Raises InvalidRequest for unsupported fields, unless their value is accepted as a no-op."""
    refused: Refused = getattr(struct, "refused", {})
    for name in fields.keys() & refused.keys():
        harmless, instead = refused[name]
        value = fields[name]
        if isinstance(value, msgspec.Raw):
            value = msgspec.json.decode(value)
        # The types are compared too: 0 is not False, 1.0 not 1.
        if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
            raise InvalidRequest(f"`{path}{name}` is not supported. {instead}", param=path + name)


@functools.cache
def _defined(struct: type) -> frozenset[str]:
    """The names of fields that are known, even if they are refused or have no effect."""
    expected = type_of(struct)
    assert isinstance(expected, inspect.StructType), "bodies are structs"
    own = {field.encode_name for field in expected.fields}
    refused: Refused = getattr(struct, "refused", {})
    hints: frozenset[str] = getattr(struct, "hints", frozenset())
    tag = {expected.tag_field} if expected.tag_field else set()
    return frozenset({*own, *tag, *refused, *hints})


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


MAX_PARTS = 1 << 16
"""Objects, arrays and fields of a body: to decode so many takes about 10 ms."""
MAX_ENTRIES = 1 << 19
"""Entries of all arrays and objects, such as token ids."""
_CHUNK_BYTES = 64 << 10


class TooManyParts(BatonError):
    """The body has more objects, arrays and fields than are decoded."""

    code = "too_many_parts"
    status = 400
    kind = "invalid_request_error"


def check_parts(raw: bytes) -> None:
    """Raises TooManyParts. Goes through the body in short steps, between which other threads run."""
    if len(raw) <= MAX_PARTS:
        return
    in_string, rest, num_parts, num_entries = 0, b"", 0, 0
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = rest + raw[start : start + _CHUNK_BYTES]
        is_split = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2  # an escape that ends in the next chunk
        rest = chunk[len(chunk) - is_split :]
        chunk = chunk[: len(chunk) - is_split].replace(b"\\\\", b"").replace(b'\\"', b"")
        between = chunk.split(b'"')
        outside = b"".join(between[in_string::2])
        in_string ^= (len(between) - 1) % 2
        num_parts += sum(map(outside.count, (b"{", b"[", b":")))
        num_entries += outside.count(b",")
        for num, most, what in (
            (num_parts, MAX_PARTS, "objects, arrays and fields"),
            (num_entries, MAX_ENTRIES, "entries of arrays and objects"),
        ):
            if num > most:
                raise TooManyParts(f"The JSON body has more than {most} {what}; send fewer.")
