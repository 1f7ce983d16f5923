"""Detects async generators that were not closed, whose resources only the garbage collector frees."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_abandoned() -> Iterator[None]:
    """Fails the test if a generator inside the context and its event loop was not closed."""
    abandoned: list[str] = []
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(before.firstiter, lambda generator: abandoned.append(repr(generator)))
    try:
        yield
        gc.collect()
    finally:
        sys.set_asyncgen_hooks(*before)
    assert not abandoned
