"""Receives request bodies within limits, decodes and validates them: errors name the field."""

import codecs
import functools
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from baton.errors import BatonError, InvalidRequest
from frontend.http.exchange import ClientGone, Exchange
from frontend.turn.fields import Refused

AnyBody = TypeVar("AnyBody", bound=msgspec.Struct)

FREE_BYTES = 64 << 10
"""Of each body, which the server buffers anyway: ordinary requests are read whatever others send."""
MIN_BYTES = 64 << 20
_PART_OF_MEMORY = 64


class BodyTooLarge(InvalidRequest, code="body_too_large", status=413):
    """The body exceeds the size limit."""


class EncodedBody(InvalidRequest, code="unsupported_encoding", status=415):
    """The body has a content encoding, such as gzip."""


class BodiesFull(BatonError, code="bodies_full", status=503):
    """There is no memory for a body now."""


class Bodies:
    """Counts the bytes of bodies that are being read or used, beyond FREE_BYTES each. One body is always
    read: a retry must be able to succeed. A single one may have `max_body_bytes`."""

    def __init__(self, max_bytes: int = MIN_BYTES, max_body_bytes: int = 16 << 20) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._max_body_bytes = max_body_bytes

    @asynccontextmanager
    async def received(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The whole body, which counts until the context ends. Raises EncodedBody, BodyTooLarge (before
        reading if declared), BodiesFull or ClientGone."""
        encoding = exchange.headers.get(b"content-encoding", b"identity")
        if encoding != b"identity":
            shown = encoding.decode(errors="replace")[:40]
            raise EncodedBody(f"Content-Encoding {shown!r} is not supported; send plain JSON.")
        declared, body, most = exchange.headers.get(b"content-length", b""), bytearray(), self._max_body_bytes
        has_more, counted = True, 0
        if declared.isdigit() and int(declared) > most:
            raise _too_large(most)
        try:
            while has_more:
                message = await exchange.receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message.get("body", b"")
                has_more = message.get("more_body", False)
                if len(body) > most:
                    raise _too_large(most)
                if (more := len(body) - FREE_BYTES - counted) > 0:
                    self._count(more, counted)
                    counted += more
            whole = bytes(body)
            del body, message  # long ones would be in memory twice while they are used
            yield whole
        finally:
            self.num_bytes -= counted

    def _count(self, more: int, counted: int) -> None:
        if self.num_bytes > counted and self.num_bytes + more > self.max_bytes:
            raise BodiesFull("The server reads as many long bodies as it can; retry later.", retry_after_s=1)
        self.num_bytes += more


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body exceeds the limit of {most} bytes.")


def default_bytes() -> int:
    """A part of the memory that this machine or container has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no such file, or no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(MIN_BYTES, memory // _PART_OF_MEMORY)


MAX_EXPLAINED_BYTES = 1 << 20
"""A longer body is not decoded without types, which would hold up running streams, to explain its error."""

MAX_UNKNOWN = 1000
"""Unknown fields that are named; a body may have many more."""

TOO_DEEP = "The JSON body is nested too deeply."
# A surrogate pair, a lone surrogate, or any other escape, so that an escaped backslash is passed over.
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)


def decode(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    """The validated body, and the sorted paths of its unknown fields, or of some if there are many.

    A struct may have class variables: `refused` (see `Refused`), `hints`, fields accepted with any value and
    without effect, and `shallow`, fields that are not searched for unknown fields inside.

    Raises InvalidRequest for invalid or unsupported fields; `param` is the path, as in `messages[0].role`.
    Raises TooManyParts."""
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
        raise InvalidRequest(TOO_DEEP) from None


def _decoded(raw: bytes, body_type: type[AnyBody]) -> tuple[AnyBody, tuple[str, ...]]:
    try:
        body = msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        value = msgspec.json.decode(raw) if len(raw) <= MAX_EXPLAINED_BYTES else None
        raise _explained(error, value, body_type) from None
    unknown: dict[str, None] = {}  # without list indices, as in `tools[].name`
    _search(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), body, "", "", unknown)
    return body, tuple(sorted(unknown))


def convert(value: object, struct: type[AnyBody], path: str, *, strict: bool = True) -> AnyBody:
    """The struct of a part of a body; `path` is its place. Unless `strict`, numbers may be texts, as in
    query strings. Raises InvalidRequest."""
    try:
        return msgspec.convert(value, struct, strict=strict)
    except msgspec.ValidationError as error:
        raise _explained(error, value, struct, path) from None


def _without_lone_surrogates(raw: bytes) -> bytes:
    """The body with U+FFFD for each lone surrogate, which clients send when they truncate text."""
    whole = bytearray(raw)
    for escape in _ESCAPE.finditer(raw):
        if escape[1]:
            whole[slice(*escape.span())] = rb"\ufffd"
    return bytes(whole)


@functools.cache
def _known(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """The attribute of each known field of a struct, empty if it is not searched."""
    known = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    tag = filter(None, [struct.__struct_config__.tag_field])
    others = (getattr(struct, name, ()) for name in ("refused", "hints", "shallow"))
    return {**known, **dict.fromkeys(chain(tag, *others), "")}


def _search(value: Any, found: object, path: str, label: str, unknown: dict[str, None]) -> None:
    """Adds the unknown fields inside a value, which was decoded as `found`, to `unknown`. `path` is its
    place, as in `tools[0]`, `label` is the same without indices. Raises InvalidRequest for unsupported
    fields."""
    if isinstance(found, list) and found and isinstance(found[0], msgspec.Struct):
        for i, (item, each) in enumerate(zip(_read(value), found, strict=True)):
            _search(item, each, f"{path}[{i}]", f"{label}[]", unknown)
    elif isinstance(found, msgspec.Struct):
        value, known = _read(value), _known(type(found))
        refused: Refused = getattr(found, "refused", {})
        for name in refused.keys() & value.keys():
            _refuse(_read(value[name]), *refused[name], _join(path, name))
        for name, item in value.items():
            if name not in known:
                if len(unknown) < MAX_UNKNOWN:
                    unknown[_join(label, name)] = None
            elif attribute := known[name]:
                inner = getattr(found, attribute)
                if isinstance(inner, msgspec.Struct | list):
                    _search(item, inner, _join(path, name), _join(label, name), unknown)


def _read(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _refuse(value: object, harmless: tuple[object, ...], instead: str, path: str) -> None:
    # The types are compared too: 0 is not False, 1.0 not 1.
    if value is not None and not any(value == v and type(value) is type(v) for v in harmless):
        raise InvalidRequest.at(path, f"is not supported. {instead}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@functools.cache
def _type_of(struct: type) -> inspect.StructType:
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType), "bodies and their parts are structs"
    return found


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):  # of a type with a description
        kind = kind.type
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


_MISSING = re.compile(r"Object missing required field `(.+)`")
_STEP = re.compile(r"\.([^.\[`]+)|\[(\d+|\.{3})\]")
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.ListType: "an array",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}
_LIMITS = {
    "gt": "above",
    "ge": "at least",
    "le": "at most",
    "min_length": "length at least",
    "max_length": "length at most",
    "pattern": "pattern",
}


def _allowed(kinds: Iterable[inspect.Type]) -> str:
    """What a value may be, as in `one of auto, none or an object`; empty if anything."""
    values = sorted(str(v) for kind in kinds if isinstance(kind, inspect.LiteralType) for v in kind.values)
    found = [f"one of {', '.join(values)}"] if values else []
    for kind in kinds:
        if (word := _WORDS.get(type(kind))) is not None:
            given = {name: getattr(kind, name, None) for name in _LIMITS}
            limits = [f"{_LIMITS[name]} {value}" for name, value in given.items() if value is not None]
            found.append(f"{word} ({', '.join(limits)})" if limits else word)
    return " or ".join(dict.fromkeys(found))


def _explained(error: msgspec.ValidationError, value: Any, struct: type, path: str = "") -> InvalidRequest:
    """The error of msgspec for a JSON value, with its whole path and the values that are allowed. `value` is
    None if it is too long to look at."""
    text, _, place = str(error).partition(" - at ")
    missing = _MISSING.match(text)
    steps = [*_STEP.findall(place.rpartition("$")[2]), *([(missing[1], "")] if missing else [])]
    if not steps and not path:
        return InvalidRequest("The body must be a JSON object.")
    kinds: list[inspect.Type] = [_type_of(struct)]
    owners, field = kinds, ""
    for name, index in steps:
        if name:
            owners, field = kinds, name
            kinds, path, value = _field_kinds(kinds, name), _join(path, name), _inside(value, name)
        elif index == "...":  # of an object with any keys
            kinds = [
                k for kind in kinds if isinstance(kind, inspect.DictType) for k in _kinds(kind.value_type)
            ]
            path = _join(path, _wrong_key(value, owners, field))
        else:
            kinds = [
                k for kind in kinds if isinstance(kind, inspect.ListType) for k in _kinds(kind.item_type)
            ]
            path, value = f"{path}[{index}]", _inside(value, int(index))
    if place.startswith("`key`"):
        kinds = [kind.key_type for kind in kinds if isinstance(kind, inspect.DictType)]
        return InvalidRequest(f"Each key of `{path}` must be {_allowed(kinds)}.", param=path)
    allowed = _allowed(kinds)
    if missing:
        what = f"is missing; it must be {allowed}" if allowed else "is missing"
    else:
        what = f"must be {allowed}" if allowed else f"is not valid: {text}"
    return InvalidRequest.at(path, f"{what}.")


def _field_kinds(kinds: Iterable[inspect.Type], name: str) -> list[inspect.Type]:
    """What a field of a value may be that is one of `kinds`."""
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if any(name == struct.tag_field for struct in structs):
        return [inspect.LiteralType(tuple(str(struct.tag) for struct in structs))]
    fields = (field for struct in structs for field in struct.fields if field.encode_name == name)
    return [kind for field in fields for kind in _kinds(field.type)]


def _inside(value: Any, place: str | int) -> Any:
    """What is there; None if nothing is, as for the first of two fields with one name."""
    try:
        return value[place]
    except (LookupError, TypeError):
        return None


def _wrong_key(value: Any, kinds: Iterable[inspect.Type], field: str) -> str:
    """The key of the first entry of an object that does not fit the field of a struct of these kinds."""
    structs = (kind.cls for kind in kinds if isinstance(kind, inspect.StructType))
    owner = next(struct for struct in structs if field in struct.__struct_fields__)
    hint = get_type_hints(owner, include_extras=True)[field]
    for key, item in value.items() if isinstance(value, dict) else ():
        try:
            msgspec.convert({key: item}, hint)
        except msgspec.ValidationError:
            return str(key)
    return "..."


MAX_PARTS = 1 << 16
"""Objects, arrays and fields of a body: to decode so many takes about 10 ms."""
MAX_ENTRIES = 1 << 19
"""Entries of all arrays and objects, such as token ids."""
_CHUNK_BYTES = 64 << 10


class TooManyParts(InvalidRequest, code="too_many_parts", status=400):
    """The body has more objects, arrays and fields than are decoded."""


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
