"""API keys: the file with their digests, and the key that a request presents."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

MAX_FILE_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_WRITABLE_BY_OTHERS = 0o022

ADMIN = "admin"
"""The third word in the line of an admin key."""


class ApiKey(NamedTuple):
    """Keys with one name belong to one client. An admin's shows the requests of all clients."""

    name: str
    is_admin: bool = False


Keys = Mapping[bytes, ApiKey]
"""Each key by its SHA-256."""


def read_keys(path: Path) -> Keys:
    """The keys in the file. Raises OSError, or ValueError with a sentence that quotes nothing of the file."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & _WRITABLE_BY_OTHERS:
            raise ValueError(f"others can write to {path} and add keys; run: chmod go-w {path}")
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return parse_keys(raw.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def parse_keys(text: str) -> Keys:
    """The keys of the lines `NAME SHA256` or `NAME SHA256 admin`; empty lines and those that begin with # are
    skipped. Raises ValueError: `line 3: why`."""
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if wrong := _fault(words):
            raise ValueError(f"line {number}: {wrong}")
        digest = bytes.fromhex(words[1])
        if digest in keys:
            raise ValueError(f"line {number}: this key is already in the file")
        keys[digest] = ApiKey(words[0], ADMIN in words[2:])
    return keys


def _fault(words: list[str]) -> str:
    """What is wrong with a line, if anything. Its words are not quoted: one of them may be a key."""
    if not _NAME.fullmatch(words[0]):
        return "the name must be 1 to 64 letters, digits or ._@-, and begin with a letter or digit"
    if len(words) == 1 or not _DIGEST.fullmatch(words[1]):
        return "the second word must be the key's SHA-256: 64 hexadecimal digits"
    if words[2:] not in ([], [ADMIN]):
        return (
            f"only NAME SHA256 and `{ADMIN}` are allowed; limits per minute are no longer supported, use a "
            "gateway for them"
        )
    return ""


def line_of(name: str, key: str, *, is_admin: bool = False) -> str:
    """The line of a key in the file. Raises ValueError."""
    words = [name, _digest(key.encode()).hex(), *([ADMIN] if is_admin else [])]
    if wrong := _fault(words):
        raise ValueError(wrong)
    return " ".join(words)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a request presents: as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or both."""
    found = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                found.append(credentials.strip())
        elif name == b"x-api-key":
            found.append(value.strip())
    return [key for key in found if key]


def key_of(keys: Keys, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
    """The first presented key that is in the file. Its digest is looked up, which takes a time that depends
    on the digest only, and a guesser cannot choose that."""
    return next((found for key in presented(headers) if (found := keys.get(_digest(key)))), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
