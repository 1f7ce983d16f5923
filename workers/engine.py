"""The seam to an engine: token requests in, tokens or a handoff out. Text never gets here."""

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from baton.messages import GenerateRequest, KvHandoff, KvLayout, TokenChunk, WorkerStats


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is: its name and version, what it holds, how its KV travels. See WorkerInfo."""

    name: str
    version: str
    context_length: int
    kv_layout: KvLayout | None = None
    kv_transfer: str = ""
    kv_timeout_s: float | None = None


class Engine(Protocol):
    """An engine in one role. Held to its contract by `tests/contract/test_engine.py`.

    To cancel is to close the generator: the engine aborts and frees the slot in its `finally`. Errors about
    one request are BatonErrors from the generator. A dead engine raises WorkerLost, as another worker
    can serve the request, and `failed()` returns: the worker withdraws and exits non-zero.
    """

    async def start(self) -> EngineInfo:
        """Load and warm up; returns when requests can be served. May take minutes."""
        ...

    def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Run the prompt. Yields exactly one reply: the handoff, or the finished answer if the first token
        ended it. After a handoff the generator stays open while the KV is pinned and ends when it has moved,
        if the engine knows; else it waits to be closed. It raises HandoffFailed when the time to live is
        over. Closing it frees the pin: at once, or where the engine cannot, when that time is over.
        """
        ...

    def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer's chunks, the first token included. With `request.handoff` the KV is taken over
        from the prefill worker; without, the engine prefills by itself. Raises HandoffFailed if the KV does
        not arrive.
        """
        ...

    def stats(self) -> WorkerStats:
        """Live figures; cheap, never blocks."""
        ...

    async def failed(self) -> str:
        """Wait until the engine is broken beyond repair; returns the reason. Never returns on a sound one."""
        ...

    async def stop(self) -> None:
        """Abort what still runs and let go of memory and devices."""
        ...
