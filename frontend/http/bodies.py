"""The memory that the bodies of all requests may use together."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from baton.errors import BatonError
from frontend.http.exchange import Exchange

FREE_BYTES = 64 << 10
"""Of each body, which the server buffers anyway: ordinary requests are read whatever others send."""
MIN_BYTES = 64 << 20
_PART_OF_MEMORY = 64


class BodiesFull(BatonError):
    """There is no memory for a body now."""

    code = "bodies_full"
    status = 503
    kind = "service_unavailable_error"


class Bodies:
    """Counts the bytes of bodies that are being read or prepared, beyond FREE_BYTES each. One body is always
    read: a retry must be able to succeed."""

    def __init__(self, max_bytes: int = MIN_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    @asynccontextmanager
    async def read(self, exchange: Exchange, max_body_bytes: int) -> AsyncIterator[bytes]:
        """The body, which counts during the context. Raises BodiesFull, or as `Exchange.read_body` does."""
        counted = 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            more = max(0, num_bytes - FREE_BYTES) - counted
            has_company = self.num_bytes > counted
            if more and has_company and self.num_bytes + more > self._max_bytes:
                raise BodiesFull(
                    "The server reads as many long bodies as it can; retry later.", retry_after_s=1
                )
            counted += more
            self.num_bytes += more

        try:
            yield await exchange.read_body(max_body_bytes, count)
        finally:
            self.num_bytes -= counted


def default_bytes() -> int:
    """A part of the memory that this machine or container has."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # there is no such file, or no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(MIN_BYTES, memory // _PART_OF_MEMORY)
