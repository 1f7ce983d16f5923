"""One token request: prefill -> handoff -> decode, tried again on other workers, within the deadline."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import msgspec

from baton.errors import BatonError, DeadlineExceeded, HandoffFailed, NoWorkers, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, Reply, Role, TokenChunk, WorkerInfo
from baton.transport import Transport
from frontend.metrics import Metrics
from frontend.routing.fleet import Fleet
from frontend.routing.router import RouterMode, make_router

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4


class Generator:
    """Answers token requests with the fleet's workers."""

    def __init__(self, transport: Transport, fleet: Fleet, mode: RouterMode, metrics: Metrics) -> None:
        self._transport = transport
        self._fleet = fleet
        self._metrics = metrics
        self._num_running: Counter[str] = Counter()
        self._pick = make_router(mode, self._num_running)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answer's chunks. A worker that is lost on the way is replaced by another: prompt and tokens so
        far are prefilled there, and the stream goes on where it stopped, no token twice and none lost.

        Raises the BatonError that ended it: NoWorkers, Overloaded, DeadlineExceeded, WorkerLost, ...
        """
        progress = _Progress(request)
        while True:
            async with AsyncExitStack() as calls:
                try:
                    async for chunk in await self._start(progress, calls):
                        if isinstance(chunk, TokenChunk):
                            progress.token_ids += chunk.token_ids
                            yield chunk
                            if chunk.finish_reason:
                                return
                    raise WorkerLost("The worker ended the stream before the answer was complete.")
                except BatonError as error:
                    if isinstance(error, WorkerLost) and progress.asked:
                        self._fleet.suspect(progress.asked[-1])
                    progress.note_failure(error)
                    log.warning("retry request_id=%s after %s: %s", request.request_id, error.code, error)

    async def _start(self, progress: "_Progress", calls: AsyncExitStack) -> AsyncGenerator[Reply, None]:
        """Place what is left of the request; the stream of its tokens. `calls` closes all that it opened.

        The prefill call stays open until decode's first chunk, which says that the KV has moved: not every
        engine knows. To close it earlier is to release the KV pinned there.
        """
        request = progress.remaining()
        prefill = self._choose(Role.PREFILL, progress)
        if prefill is None:
            return await self._decode(request, progress, calls, prefill)
        prefilling = await calls.enter_async_context(AsyncExitStack())
        pinned = await self._call(prefill, request, progress, prefilling)
        began_s = time.perf_counter()
        first = await anext(pinned, None)
        self._metrics.prefill_s.observe(time.perf_counter() - began_s)
        if isinstance(first, TokenChunk):
            return _only(first)
        if not isinstance(first, KvHandoff):
            raise HandoffFailed(f"Prefill worker {prefill.worker_id} sent no handoff.")
        request = msgspec.structs.replace(request, handoff=first)
        tokens = await self._decode(request, progress, calls, prefill)
        return await calls.enter_async_context(aclosing(self._handed_over(pinned, tokens, prefilling)))

    async def _handed_over(
        self,
        pinned: AsyncGenerator[Reply, None],
        tokens: AsyncGenerator[Reply, None],
        prefilling: AsyncExitStack,
    ) -> AsyncGenerator[Reply, None]:
        """Decode's stream; its first chunk closes the prefill call."""
        began_s = time.perf_counter()
        first = await _first_chunk(pinned, tokens)
        self._metrics.handoff_s.observe(time.perf_counter() - began_s)
        await prefilling.aclose()
        if first is not None:
            yield first
        async for reply in tokens:
            yield reply

    async def _decode(
        self,
        request: GenerateRequest,
        progress: "_Progress",
        calls: AsyncExitStack,
        prefill: WorkerInfo | None,
    ) -> AsyncGenerator[Reply, None]:
        decode = self._choose(Role.DECODE, progress, paired_with=prefill)
        if decode is None:
            raise progress.error or NoWorkers(f"No decode worker is live for {request.model}; start one.")
        return await self._call(decode, request, progress, calls)

    def _choose(
        self, role: Role, progress: "_Progress", *, paired_with: WorkerInfo | None = None
    ) -> WorkerInfo | None:
        live = self._fleet.workers(progress.request.model, role, paired_with=paired_with)
        untried = [worker for worker in live if worker.incarnation not in progress.avoided]
        return self._pick(role, progress.request, untried) if untried else None

    async def _call(
        self, worker: WorkerInfo, request: GenerateRequest, progress: "_Progress", calls: AsyncExitStack
    ) -> AsyncGenerator[Reply, None]:
        progress.asked.append(worker)
        self._num_running[worker.worker_id] += 1
        calls.callback(self._num_running.subtract, [worker.worker_id])
        return await calls.enter_async_context(aclosing(self._transport.call(worker.address, request)))


class _Progress:
    """What is known of one request across its attempts."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.asked: list[WorkerInfo] = []
        self.avoided: set[str] = set()
        self.error: BatonError | None = None
        self._num_failures = 0
        self._deadline = asyncio.get_running_loop().time() + request.deadline_s

    def remaining(self) -> GenerateRequest:
        """The request as the next attempt sends it."""
        if not self._num_failures:
            return self.request
        return msgspec.structs.replace(
            self.request,
            token_ids=self.request.token_ids + self.token_ids,
            num_generated=len(self.token_ids),
            deadline_s=self._deadline - asyncio.get_running_loop().time(),
        )

    def note_failure(self, error: BatonError) -> None:
        """Remember whom to avoid; raises if another attempt makes no sense."""
        self._num_failures += 1
        if not error.retryable or not self.asked or self._num_failures == MAX_ATTEMPTS:
            raise error
        if asyncio.get_running_loop().time() >= self._deadline:
            raise DeadlineExceeded
        # A handoff fails at its source: the decode worker that reported it may well be the next one's too.
        culprit = self.asked[0] if isinstance(error, HandoffFailed) else self.asked[-1]
        self.avoided.add(culprit.incarnation)
        self.asked.clear()
        self.error = error


async def _only(chunk: TokenChunk) -> AsyncGenerator[Reply, None]:
    yield chunk


async def _first_chunk(
    pinned: AsyncGenerator[Reply, None], tokens: AsyncGenerator[Reply, None]
) -> Reply | None:
    """Raises HandoffFailed as soon as prefill fails: the KV is lost with it, however long decode waits."""
    arriving = asyncio.ensure_future(anext(tokens, None))
    moved = asyncio.ensure_future(anext(pinned, None))
    try:
        await asyncio.wait((arriving, moved), return_when=asyncio.FIRST_COMPLETED)
        if not arriving.done() and moved.exception() is not None:
            raise HandoffFailed(f"Prefill failed before its KV had moved: {moved.exception()}")
        return await arriving
    finally:
        arriving.cancel()
        moved.cancel()
        await asyncio.gather(arriving, moved, return_exceptions=True)
