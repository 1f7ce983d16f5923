"""The Engine protocol: token requests in, tokens or a handoff out. Engines never see text."""

from collections.abc import AsyncGenerator
from typing import Protocol

from baton.messages import EngineInfo, GenerateRequest, KvHandoff, TokenChunk, WorkerStats

__all__ = ["Engine", "EngineInfo"]


class Engine(Protocol):
    """An engine in one role. Contract: `tests/contract/test_engine.py`.

    To cancel is to close the generator: the engine aborts and frees the slot in its `finally`. Errors of one
    request are BatonErrors from the generator. A dead engine raises WorkerLost, as another worker can serve
    the request, and `failed()` returns; the worker then withdraws and exits non-zero."""

    async def start(self) -> EngineInfo:
        """Load and warm up; returns when requests can be served. May take minutes."""
        ...

    def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Run the prompt. Yields exactly one reply: the handoff, or the finished answer if the first token
        ended it.

        After a handoff the generator stays open while the KV is pinned. It ends when the KV has moved, if the
        engine knows; else it waits to be closed. It raises HandoffFailed when the time to live expires.
        Closing it frees the pin at once, or at expiry if the engine cannot do so earlier."""
        ...

    def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer's chunks, including the first token unless it is the handoff's `first_chunk`. With
        `request.handoff` the KV is pulled from the prefill worker; otherwise the engine prefills. Raises
        HandoffFailed if the KV does not arrive."""
        ...

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        """How many of the request's tokens `decode` would compute now: those whose KV is not cached. May be
        an estimate; cheap, never blocks."""
        ...

    def stats(self) -> WorkerStats:
        """Live metrics; cheap, never blocks."""
        ...

    async def failed(self) -> str:
        """Wait for a fatal engine failure and return its reason."""
        ...

    async def stop(self) -> None:
        """Abort running requests and free memory and devices."""
        ...
