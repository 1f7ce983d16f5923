"""Async generators that nobody closed: what they hold is let go late, by the garbage collector."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_abandoned() -> Iterator[None]:
    """Fails the test if, inside the context and its event loop, a generator was left without being closed."""
    abandoned: list[str] = []
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(before.firstiter, lambda generator: abandoned.append(repr(generator)))
    try:
        yield
        gc.collect()
    finally:
        sys.set_asyncgen_hooks(*before)
    assert not abandoned
