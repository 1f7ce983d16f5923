"""API keys, by the digests in their file, and how many requests and tokens each may use in a minute."""

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from baton.errors import BatonError

Headers = Sequence[tuple[bytes, bytes]]

MINUTE_S = 60.0


class RateLimited(BatonError):
    """The API key has used its requests or tokens per minute; retry after `retry_after_s`."""

    code = "rate_limit_exceeded"
    status = 429
    kind = "rate_limit_error"


KeyLimits = dict[str, int]
"""How many `requests` and `tokens` a key may use in a minute; what is absent is not limited."""


class Used(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """How many requests or tokens a key of that name and with these limits used."""

    name: str
    limits: KeyLimits
    what: str
    num: int


class Quota:
    """What the keys of one name may still use; it fills up within a minute. It may be overdrawn, as the
    length of an answer is known at its end; then nothing is allowed until it has filled up again. `share`
    sends what is used to the frontend's other processes.
    """

    def __init__(
        self, name: str, limits: KeyLimits, share: Callable[[Used], None], clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self._name = name
        self._share = share
        self._clock = clock
        self._left: dict[str, float] = dict(limits)
        self._since_s = clock()

    def admit(self) -> None:
        """Take a request. Raises RateLimited."""
        for what in self.limits:
            self._check(what)
        if "requests" in self.limits:
            self._use("requests", 1)

    def take_prompt(self, num_tokens: int) -> None:
        """Take a prompt's tokens. Raises RateLimited if other requests have used them since `admit`."""
        if "tokens" in self.limits:
            self._check("tokens")
        self.take_answer(num_tokens)

    def take_answer(self, num_tokens: int) -> None:
        """Take an answer's tokens."""
        if num_tokens and "tokens" in self.limits:
            self._use("tokens", num_tokens)

    def note(self, used: Used) -> None:
        """Take what was used, here or in another process."""
        self._filled()[used.what] -= used.num

    def headers(self) -> Headers:
        """OpenAI's x-ratelimit headers of an answer."""
        headers = []
        for what, most in self.limits.items():
            left = self._filled()[what]
            full_s = (most - left) / most * MINUTE_S
            values = {"limit": most, "remaining": max(0, int(left)), "reset": f"{full_s:.3f}s"}
            headers += [
                (f"x-ratelimit-{name}-{what}".encode(), str(v).encode()) for name, v in values.items()
            ]
        return headers

    def _use(self, what: str, num: int) -> None:
        used = Used(self._name, self.limits, what, num)
        self.note(used)
        self._share(used)

    def _check(self, what: str) -> None:
        left, most = self._filled()[what], self.limits[what]
        if left < 1:
            wait_s = (1 - left) / most * MINUTE_S
            raise RateLimited(
                f"The API key {self._name!r} has reached its limit of {most} {what} per minute; "
                f"retry in {math.ceil(wait_s)} s.",
                retry_after_s=wait_s,
            )

    def _filled(self) -> dict[str, float]:
        """What is left now."""
        now_s = self._clock()
        for what, most in self.limits.items():
            self._left[what] = min(self._left[what] + (now_s - self._since_s) * most / MINUTE_S, most)
        self._since_s = now_s
        return self._left


NO_QUOTA = Quota("", {}, lambda _: None, time.monotonic)
"""Of a key without limits, or of no key."""


class Quotas:
    """The quotas by name; `share` as in Quota."""

    def __init__(
        self, share: Callable[[Used], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def of(self, name: str, limits: KeyLimits) -> Quota:
        """The quota of that name; a new one if its limits have changed."""
        if not limits:
            return NO_QUOTA
        quota = self._quotas.get(name)
        if quota is None or quota.limits != limits:
            quota = self._quotas[name] = Quota(name, limits, self._share, self._clock)
        return quota

    def note(self, used: Used) -> None:
        """Another process's use."""
        self.of(used.name, used.limits).note(used)


MAX_FILE_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIMIT = re.compile(r"(requests|tokens)-per-minute=([1-9][0-9]{0,11})")
_WRITABLE_BY_OTHERS = 0o022


class ApiKey(msgspec.Struct, frozen=True):
    """What is known of a key. Keys with the same name are the same client's, e.g. its old and its new one."""

    name: str
    limits: KeyLimits = {}


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
    name, digest, *limits = [*words, ""] if len(words) == 1 else words
    if not _NAME.fullmatch(name):
        raise ValueError("the name must be 1 to 64 letters, digits or ._@-, and begin with a letter or digit")
    if not _DIGEST.fullmatch(digest):
        raise ValueError("the second word must be the key's SHA-256: 64 hexadecimal digits")
    found = {match[1]: int(match[2]) for word in limits if (match := _LIMIT.fullmatch(word))}
    if len(found) < len(limits):
        raise ValueError("only requests-per-minute=N and tokens-per-minute=N may follow, once each")
    return bytes.fromhex(digest), ApiKey(name, found)


def line_of(name: str, key: str, **limits: int | None) -> str:
    """The line of a key in the file. Raises ValueError."""
    words = [name, _digest(key.encode()).hex()]
    words += [f"{what}-per-minute={num}" for what, num in limits.items() if num is not None]
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
