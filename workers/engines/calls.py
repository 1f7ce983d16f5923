"""The open requests of a third-party engine: deadlines, cancellation from outside, engine death."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from baton.errors import BatonError, HandoffFailed, NotReady, WorkerLost

T = TypeVar("T")
log = logging.getLogger(__name__)


class Ending:
    """Ends a request's wait at a given time, or with `error` once it is set from outside."""

    def __init__(self) -> None:
        self.error: BatonError | None = None
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Coroutine[Any, Any, T], until: float, over: BatonError) -> T:
        """Run `work` until this time of the event loop: raises `over` then, or `error`."""
        if self.error is not None:
            work.close()
            raise self.error
        waiting = self._waiting = asyncio.timeout_at(until)
        try:
            async with waiting:
                result = await work
        except TimeoutError:
            if not waiting.expired():
                raise  # the engine's own
            raise self._ended_or(over) from None
        finally:
            self._waiting = None
        if self.error is not None:
            raise self.error
        return result

    def _ended_or(self, error: BatonError) -> BatonError:
        return self.error if self.error is not None else error

    async def pinned(self, ttl_s: float) -> None:
        """Wait to be closed. Raises HandoffFailed at the time limit, or `error`."""
        over = HandoffFailed(f"no decode worker took the KV within {ttl_s:.3g} s")
        await self.wait(asyncio.Event().wait(), asyncio.get_running_loop().time() + ttl_s, over)

    def end_with(self, error: BatonError) -> None:
        """Make the pending or next wait raise `error`."""
        self.error = error
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())


class Endable(Protocol):
    """A request inside an engine."""

    ending: Ending


C = TypeVar("C", bound=Endable)


class OpenCalls(Generic[C]):
    """The requests in one engine. `llm` is None before it is loaded and after `stop`."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.broke = asyncio.Event()
        self.reason = ""
        self.calls: set[C] = set()

    def check_running(self) -> None:
        """Raise NotReady, or WorkerLost if the engine is dead: another worker can serve the request."""
        if self.llm is None:
            raise NotReady("the engine is not running")
        if self.broke.is_set():
            raise WorkerLost(self.reason)

    def break_off(self, reason: str) -> None:
        """The engine is dead: end every request with WorkerLost."""
        if self.broke.is_set():
            return
        log.error("engine broke reason=%s", reason)
        self.reason = reason
        self.broke.set()
        for call in self.calls:
            call.ending.end_with(WorkerLost(reason))

    def stop(self) -> Any:
        """End every request with WorkerLost; returns the LLM for its shutdown."""
        llm, self.llm = self.llm, None
        for call in self.calls:
            call.ending.end_with(WorkerLost("the worker stopped while it held the request"))
        return llm
