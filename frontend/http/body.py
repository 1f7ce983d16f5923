"""Decodes a request's body: validated once, refused by the name of a field, unknown fields reported."""

import re
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec
from msgspec import inspect

from baton.errors import InvalidRequest
from frontend.http.faults import first_fault, type_of
from frontend.turn.fields import Refused

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)

_NUMBER = re.compile(r"\[\d+\]")
# A surrogate pair, a lone surrogate, or any other escape, so that an escaped backslash is passed over.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def decode(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    """The validated body, and the paths of its fields that no API defines, sorted.

    A struct may say more in class variables: `refused` (see `Refused`), `hints`, which change nothing in an
    answer by their definition, so that any value will do, and `deep`, the fields that are searched inside.

    Raises InvalidRequest for anything that is not served, `param` naming the field as `messages[0].role`.
    """
    try:
        return _decoded(raw, body_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        whole = _ESCAPE.sub(_whole_character, raw)
        if whole != raw:
            return decode(whole, body_type)
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _decoded(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        _refuse(fields, body_type)
        return msgspec.json.decode(raw, type=body_type), tuple(sorted(_unknown(fields, body_type)))
    except msgspec.ValidationError as error:
        raise invalid(msgspec.json.decode(raw), body_type) or InvalidRequest(f"The body: {error}.") from None


def invalid(value: object, expected: type, path: str = "") -> InvalidRequest | None:
    """The refusal of a JSON value that does not fit a type; `path` is where the value stands in the body."""
    fault = first_fault(value, type_of(expected), path)
    if fault is None:
        return None
    if not fault.path:
        return InvalidRequest("The body must be a JSON object.")
    separator = "" if fault.why.startswith("is missing") else ":"
    return InvalidRequest(f"`{fault.path}`{separator} {fault.why}.", param=fault.path)


def _whole_character(escape: re.Match[bytes]) -> bytes:
    """Half a character, which clients write when they cut text, becomes the replacement character."""
    return rb"\ufffd" if escape[1] else escape[0]


def _unknown(fields: Mapping[str, msgspec.Raw], body_type: type) -> set[str]:
    """Paths of the fields that no API defines, without the numbers of list entries: `tools[].name`."""
    expected = type_of(body_type)
    assert isinstance(expected, inspect.StructType), "bodies are structs"
    unknown = set(fields.keys() - _defined(expected))
    deep: frozenset[str] = getattr(body_type, "deep", frozenset())
    for field in expected.fields:
        if field.encode_name in deep & fields.keys():
            value = msgspec.json.decode(fields[field.encode_name])
            unknown |= {_NUMBER.sub("[]", p) for p in _undefined(value, field.type, field.encode_name)}
    return unknown


def _undefined(value: object, expected: inspect.Type, path: str) -> Iterator[str]:
    """Paths of the fields inside a value of a body that no API defines, as `tools[0].name`."""
    match expected:
        case inspect.UnionType(types=kinds):
            for kind in kinds:
                if first_fault(value, kind) is None:
                    yield from _undefined(value, kind, path)
        case inspect.ListType(item_type=kind) if isinstance(value, list):
            for i, item in enumerate(value):
                yield from _undefined(item, kind, f"{path}[{i}]")
        case inspect.StructType() if isinstance(value, dict):
            _refuse(value, expected.cls, f"{path}.")
            yield from (f"{path}.{name}" for name in value.keys() - _defined(expected))
            for field in expected.fields:
                if field.encode_name in value:
                    inner = f"{path}.{field.encode_name}"
                    yield from _undefined(value[field.encode_name], field.type, inner)


def _refuse(fields: Mapping[str, object], struct: type, path: str = "") -> None:
    """Raises InvalidRequest for a field that the API defines, that is not served, and that asks for it."""
    refused: Refused = getattr(struct, "refused", {})
    for name in fields.keys() & refused.keys():
        harmless, instead = refused[name]
        value = fields[name]
        if isinstance(value, msgspec.Raw):
            value = msgspec.json.decode(value)
        # The types are compared too: 0 is not False, 1.0 not 1.
        if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
            raise InvalidRequest(f"`{path}{name}` is not served: {instead}", param=path + name)


def _defined(expected: inspect.StructType) -> frozenset[str]:
    own = {field.encode_name for field in expected.fields}
    refused: Refused = getattr(expected.cls, "refused", {})
    hints: frozenset[str] = getattr(expected.cls, "hints", frozenset())
    tag = {expected.tag_field} if expected.tag_field else set()
    return frozenset({*own, *tag, *refused, *hints})
