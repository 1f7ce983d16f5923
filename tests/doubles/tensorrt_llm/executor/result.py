"""A request's result: ONE object, yielded again at each step, with all token ids so far."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from baton.messages import Usage
from tensorrt_llm.params import Logprob

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "Response"]


@dataclasses.dataclass
class Response:
    """What one engine step adds to a result; a finish reason ends it."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: Any = None
    perf_metrics: Any = None


@dataclasses.dataclass(frozen=True)
class TimingMetrics:
    """Times since the executor's epoch; those of a transfer are zero in a context."""

    arrival_time: timedelta
    first_scheduled_time: timedelta
    first_token_time: timedelta
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()


@dataclasses.dataclass(frozen=True)
class RequestPerfMetrics:
    """What a request with `return_perf_metrics` gets with each response."""

    timing_metrics: TimingMetrics


def timing_metrics(began_s: float, usage: Usage) -> TimingMetrics:
    """Those of a request whose first token comes now."""
    now_s = time.monotonic()
    scheduled_s = now_s - usage.computed_s
    times = [timedelta(seconds=each) for each in (began_s, scheduled_s, now_s)]
    if not usage.moved_s:
        return TimingMetrics(*times)
    pulled_s = [timedelta(seconds=each) for each in (scheduled_s - usage.moved_s, scheduled_s)]
    return TimingMetrics(*times, *pulled_s)


@dataclasses.dataclass
class CompletionOutput:
    """One answer so far, as far as Baton reads it. `token_ids` and `logprobs` are cumulative."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    request_perf_metrics: Any = None


class RequestOutput:
    """The handle of one request. Its queue belongs to the loop that was running at its creation."""

    def __init__(self, request_id: int, abort: Callable[[int, bool], None]) -> None:
        self.request_id = request_id
        self.outputs = [CompletionOutput()]
        self.disaggregated_params: Any = None
        self.finished = False
        self.cached_tokens = 0
        self.decoding_iter = 0
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Response | Exception] = asyncio.Queue()

    def put(self, response: Response | Exception) -> None:
        """Called on the engine's thread: pass on a response."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)
        except RuntimeError:
            return  # the caller's loop has closed

    def abort(self) -> None:
        """Ask the engine to stop, without waiting."""
        self._abort(self.request_id, self.decoding_iter > 0)

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        await self._step()
        return self

    async def aresult(self) -> "RequestOutput":
        """Wait for the end."""
        while not self.finished:
            await self._step()
        return self

    async def _step(self) -> None:
        response = await self._queue.get()
        if isinstance(response, Exception):
            self.finished = True
            raise response
        (output,) = self.outputs
        output.token_ids += response.token_ids
        output.finish_reason = response.finish_reason
        output.stop_reason = response.stop_reason
        output.disaggregated_params = response.disaggregated_params
        output.request_perf_metrics = response.perf_metrics or output.request_perf_metrics
        self.decoding_iter += 1
        self.finished = response.finish_reason is not None
        if response.logprobs is not None:
            output.logprobs += response.logprobs
            assert len(output.logprobs) == len(output.token_ids)  # the real one's error, verbatim
