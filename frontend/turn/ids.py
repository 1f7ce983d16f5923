"""What is drawn at random for an answer: ids of responses, items and calls, and seeds."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_source: ContextVar[random.Random] = ContextVar("source", default=random.SystemRandom())  # noqa: B039  no state


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
    if not isinstance(source := _source.get(), random.SystemRandom):
        source.seed(source.randbytes(32) + hashlib.sha256(data).digest())


def new_id(prefix: str, separator: str = "_") -> str:
    """An id with 192 random bits; prefixes are `resp`, `msg`, `rs`, `call`..."""
    return f"{prefix}{separator}{_source.get().getrandbits(192):048x}"


def new_seed() -> int:
    """For sampling, if the client gave none."""
    return _source.get().getrandbits(63)
