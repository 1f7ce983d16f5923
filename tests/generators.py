"""Finds async generators that were not closed; runs tasks that end with a test."""

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager


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


@asynccontextmanager
async def running(*requests: Awaitable[object]) -> AsyncGenerator[None, None]:
    """Requests that are cancelled at the end."""
    tasks = [asyncio.ensure_future(each) for each in requests]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
