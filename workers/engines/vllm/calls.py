"""The open requests of one vLLM: steps, failed pulls, and engine core death."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from baton.messages import GenerateRequest
from workers.engines.calls import Ending, OpenCalls
from workers.engines.vllm.library import Library, Result

_POLL_S = 0.5


@dataclasses.dataclass(eq=False)
class Call:
    """A request inside vLLM; `request_id` and `cache_salt` are those given to vLLM."""

    request_id: str
    cache_salt: str
    request: GenerateRequest
    deadline: float
    results: AsyncGenerator[Result, None]
    has_answered: bool = False
    ending: Ending = dataclasses.field(default_factory=Ending)


class Calls:
    """Submits requests to vLLM and follows them; `open` holds those inside it."""

    def __init__(self, lib: Library) -> None:
        self.open: OpenCalls[Call] = OpenCalls()
        self._lib = lib
        self._num_opened = 0
        self._num_failed_pulls = 0

    @asynccontextmanager
    async def opened(self, request: GenerateRequest, sampling: Any, place: int) -> AsyncGenerator[Call, None]:
        """Submit the request at that place of vLLM's queue, lowest first; on exit it is over, aborted if
        necessary.
        """
        self._num_opened += 1
        request_id = f"{request.request_id}-{self._num_opened}"
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
        if salt := self.salt(request):
            prompt["cache_salt"] = salt
        results = self.open.llm.generate(prompt, sampling, request_id, priority=place)
        call = Call(
            request_id, salt, request, asyncio.get_running_loop().time() + request.deadline_s, results
        )
        self.open.calls.add(call)
        try:
            yield call
        finally:
            self.open.calls.discard(call)
            await results.aclose()

    async def step(self, call: Call) -> Result:
        """The next output. Raises the client's BatonError."""
        try:
            result = await call.ending.wait(_next(call.results), call.deadline, DeadlineExceeded())
        except BatonError:
            raise
        except self._lib.dead as error:
            self.open.break_off(f"vLLM's engine core died: {error}")
            raise WorkerLost(self.open.reason) from error
        except ValueError as error:
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error
        except Exception as error:  # undocumented; ends this request only
            raise EngineFailure(f"vLLM failed on this request: {error.__cause__ or error!r}") from error
        call.has_answered = True
        return result

    def fail_pulls(self) -> None:
        """A transfer has failed: end every request whose KV may not have arrived, and find no KV again that
        was cached before.

        vLLM caches what is in the blocks of the failed one, and does not say which that is. This call
        precedes every token that was computed from it, so a request that has answered did not find it.
        """
        self._num_failed_pulls += 1
        for call in self.open.calls:
            if not call.has_answered:
                call.ending.end_with(
                    HandoffFailed("the KV did not arrive: its source is gone or has dropped it")
                )

    def salt(self, request: GenerateRequest) -> str:
        """What keeps cached KV apart: the client's salt, and the failed pulls so far."""
        failed = self._num_failed_pulls
        return f"{request.cache_salt}\0{failed}" if failed else request.cache_salt

    async def watch(self) -> None:
        """Detect the engine core's death even without requests, then return."""
        while not self.open.broke.is_set():
            await asyncio.sleep(_POLL_S)  # vLLM reports its death only when asked
            try:
                await self.open.llm.check_health()
            except self._lib.dead as error:
                self.open.break_off(f"vLLM's engine core died: {error}")


async def _next(results: AsyncGenerator[Result, None]) -> Result:
    return await anext(results)
