"""What is drawn at random for an answer: ids of responses, items and calls, and seeds."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SEED_BITS = 63
_source: ContextVar[random.Random | None] = ContextVar("source", default=None)


@contextmanager
def repeatable(key: str) -> Iterator[None]:
    """In this context and its tasks, draw the same for the same `key`; nothing secret may be drawn."""
    token = _source.set(random.Random(key))  # noqa: S311  it has to be repeatable
    try:
        yield
    finally:
        _source.reset(token)


def vary(data: bytes) -> None:
    """From here on, draw the same in a repeatable context only for the same `data`, too."""
    source = _source.get()
    if source is not None:
        source.seed(source.randbytes(32) + hashlib.sha256(data).digest())


def new_id(prefix: str, separator: str = "_") -> str:
    """An id with 192 random bits; prefixes are `resp`, `msg`, `rs`, `call`..."""
    return f"{prefix}{separator}{_bits(192):048x}"


def new_seed() -> int:
    """For sampling, if the client gave none."""
    return _bits(_SEED_BITS)


def _bits(num: int) -> int:
    source = _source.get()
    if source is not None:
        return source.getrandbits(num)
    return int.from_bytes(os.urandom((num + 7) // 8)) >> (-num % 8)
