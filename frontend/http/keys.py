"""The API keys file: a line with a name and a digest for each key, and the key that a request presents."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from frontend.http.limits import UNLIMITED, KeyLimits

MAX_FILE_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIMIT = re.compile(r"(requests|tokens)-per-minute=([1-9][0-9]{0,11})")
_WRITABLE_BY_OTHERS = 0o022


class ApiKey(msgspec.Struct, frozen=True):
    """What is known of a key. Keys with the same name are the same client's, e.g. its old and its new one."""

    name: str
    limits: KeyLimits = UNLIMITED


Keys = Mapping[bytes, ApiKey]
"""By the key's SHA-256."""


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
    """The keys of the lines `NAME SHA256`, which may go on with `requests-per-minute=N` and
    `tokens-per-minute=N`; empty lines and those that begin with # are left out. Raises ValueError: `line 3:
    why`.
    """
    keys: dict[bytes, ApiKey] = {}
    limits: dict[str, KeyLimits] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            digest, key = _key(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if digest in keys:
            raise ValueError(f"line {number}: this key is already in the file")
        if limits.setdefault(key.name, key.limits) != key.limits:
            raise ValueError(f"line {number}: an earlier line of this name has other limits")
        keys[digest] = key
    return keys


def _key(words: list[str]) -> tuple[bytes, ApiKey]:
    # The words are not quoted in errors: one of them may be a key that was put here by mistake.
    if not _NAME.fullmatch(words[0]):
        raise ValueError("the name must be 1 to 64 letters, digits or ._@-, and begin with a letter or digit")
    if len(words) < 2 or not _DIGEST.fullmatch(words[1]):
        raise ValueError("the second word must be the key's SHA-256: 64 hexadecimal digits")
    return bytes.fromhex(words[1]), ApiKey(words[0], _limits(words[2:]))


def _limits(words: list[str]) -> KeyLimits:
    found = [_LIMIT.fullmatch(word) for word in words]
    limits = {match[1]: int(match[2]) for match in found if match is not None}
    if len(limits) < len(words):
        raise ValueError("only requests-per-minute=N and tokens-per-minute=N may follow, once each")
    return KeyLimits(limits.get("requests"), limits.get("tokens"))


def line_of(name: str, key: str, limits: KeyLimits = UNLIMITED) -> str:
    """The line of a key in the file. Raises ValueError."""
    words = [name, _digest(key.encode()).hex()]
    words += [f"{what}-per-minute={num}" for what, num in limits.given().items()]
    _key(words)
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


def known(keys: Keys, headers: Iterable[tuple[bytes, bytes]]) -> ApiKey | None:
    """The first presented key that is in the file. Its digest is looked up, which takes a time that depends
    on the digest only, and a guesser cannot choose that.
    """
    return next((key for each in presented(headers) if (key := keys.get(_digest(each)))), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
