"""One vLLM's open requests: their steps, what ends them from outside, and the death of the engine."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    NotReady,
    WorkerLost,
)
from baton.messages import GenerateRequest
from workers.engines.vllm.library import Library, Result

T = TypeVar("T")
log = logging.getLogger(__name__)

_POLL_S = 0.5


@dataclasses.dataclass(eq=False)
class Call:
    """A request inside vLLM, by the id that vLLM was given. `end` is what ends it from outside."""

    request_id: str
    request: GenerateRequest
    deadline: float
    results: AsyncGenerator[Result, None]
    end: BatonError | None = None
    has_answered: bool = False
    waiting: asyncio.Timeout | None = None

    async def wait(self, work: Coroutine[Any, Any, T], deadline: float, over: BatonError) -> T:
        """`work`, unless the deadline comes first: raises `over` then, or what ended the call."""
        if self.end is not None:
            work.close()
            raise self.end
        waiting = self.waiting = asyncio.timeout_at(deadline)
        try:
            async with waiting:
                result = await work
        except TimeoutError:
            if not waiting.expired():
                raise  # the engine's own
            raise self._end_or(over) from None
        finally:
            self.waiting = None
        if self.end is not None:
            raise self.end
        return result

    def _end_or(self, error: BatonError) -> BatonError:
        return self.end if self.end is not None else error

    def end_with(self, error: BatonError) -> None:
        """Make the pending step, or else the next one, raise `error`."""
        self.end = error
        if self.waiting is not None and not self.waiting.expired():
            self.waiting.reschedule(asyncio.get_running_loop().time())


class Calls:
    """`llm` is None before it is loaded and after `stop`."""

    def __init__(self, lib: Library) -> None:
        self.llm: Any = None
        self.broke = asyncio.Event()
        self.reason = ""
        self.open: set[Call] = set()
        self._lib = lib
        self._num_opened = 0

    def check_running(self) -> None:
        """Raise NotReady, or WorkerLost if the engine is dead: another worker can serve the request."""
        if self.llm is None:
            raise NotReady("the engine is not running")
        if self.broke.is_set():
            raise WorkerLost(self.reason)

    @asynccontextmanager
    async def opened(self, request: GenerateRequest, sampling: Any) -> AsyncGenerator[Call, None]:
        """The request inside vLLM; at the end it is over there, aborted if need be."""
        self._num_opened += 1
        request_id = f"{request.request_id}-{self._num_opened}"
        prompt = {"prompt_token_ids": request.token_ids}
        results = self.llm.generate(prompt, sampling, request_id, priority=request.priority)
        call = Call(request_id, request, asyncio.get_running_loop().time() + request.deadline_s, results)
        self.open.add(call)
        try:
            yield call
        finally:
            self.open.discard(call)
            await results.aclose()

    async def step(self, call: Call) -> Result:
        """The next output. Raises the BatonError that its client is told."""
        try:
            result = await call.wait(_next(call.results), call.deadline, _deadline_exceeded(call.request))
        except BatonError:
            raise
        except self._lib.dead as error:
            self.break_off(f"vLLM's engine core died: {error}")
            raise WorkerLost(self.reason) from error
        except ValueError as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error
        except Exception as error:  # what vLLM does not document ends this request
            raise EngineFailure(f"vLLM failed on this request: {error.__cause__ or error!r}") from error
        call.has_answered = True
        return result

    def break_off(self, reason: str) -> None:
        """The engine is dead: end every request with WorkerLost."""
        if self.broke.is_set():
            return
        log.error("engine broke reason=%s", reason)
        self.reason = reason
        self.broke.set()
        for call in self.open:
            call.end_with(WorkerLost(reason))

    def fail_pulls(self) -> None:
        """A transfer has failed: end every request whose KV may be the one that did not arrive."""
        for call in self.open:
            if call.request.handoff is not None and not call.has_answered:
                call.end_with(HandoffFailed("the KV did not arrive: its source is gone, or has given it up"))

    async def watch(self) -> None:
        """Notice a death that no request meets. Ends with it."""
        while not self.broke.is_set():
            await asyncio.sleep(_POLL_S)  # vLLM tells of a death only those who ask
            try:
                await self.llm.check_health()
            except self._lib.dead as error:
                self.break_off(f"vLLM's engine core died: {error}")

    def stop(self) -> Any:
        """End every request with WorkerLost; gives the LLM, to be shut down."""
        llm, self.llm = self.llm, None
        for call in self.open:
            call.end_with(WorkerLost("the worker stopped while it held the request"))
        return llm


async def _next(results: AsyncGenerator[Result, None]) -> Result:
    return await anext(results)


def _deadline_exceeded(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request's {request.deadline_s:g} s were over; ask for less, or allow more time"
    )
