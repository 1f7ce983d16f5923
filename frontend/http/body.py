"""Decodes and validates request bodies: errors name the field, unknown fields are reported."""

import asyncio
import codecs
import functools
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import inspect

from baton.errors import InvalidRequest
from frontend.http.faults import first_fault, has_shape, type_of
from frontend.http.parts import check_parts
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
