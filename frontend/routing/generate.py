"""Runs one token request: prefill -> handoff -> decode, with retries on other workers within the deadline."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sized
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from baton.errors import (
    BatonError,
    BrokerLost,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    HandoffStalled,
    NotReady,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    PrefillFirst,
    Reply,
    Role,
    TokenChunk,
    Usage,
    WorkerInfo,
    after_handoff,
)
from baton.pace import TICK_S, first_done
from baton.telemetry import Line
from baton.transport import Transport
from frontend.metrics import Metrics
from frontend.record import Leg
from frontend.routing.admission import Admission, Capacity, Router, RoutingSettings, capacity_of
from frontend.routing.fleet import Fleet
from frontend.routing.workers import Call

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""A request is given up when this many attempts have failed: it may be what kills the workers."""
_ENOUGH_TOKENS = 32
"""A worker that sent this many was not lost because of the request, so failures are counted anew."""
_BACKOFF_S = 0.1
_NOTICED_S = 1.5 * TICK_S
"""In this time heartbeats show which workers ended together with the last ones."""
_DIVERGED = "The worker was lost and the regenerated answer diverged; send the request again."


class UnknownToken(WorkerLost):
    """A worker sent a token id that the model does not have."""

    default = "The worker sent token ids that the model does not have."


class Retry(NamedTuple):
    """What a failed attempt means for the next one."""

    excludes: Literal["none", "last", "source"]
    """The worker to avoid: the last one called, or the source of the handoff, if there is one."""
    counts: Literal["always", "never", "new"]
    """Against MAX_ATTEMPTS. `new`: only before it runs: a full worker may refuse it until its deadline."""
    mode: Literal["resume", "replay", "local prefill"] = "resume"
    """`replay`: from the answer's beginning. `local prefill`: on the decode worker, without another's KV."""


RETRIES: dict[type[BatonError], Retry] = {
    BrokerLost: Retry("none", "never"),
    NoWorkers: Retry("source", "never"),  # no decode worker can take this handoff
    WorkerUnreached: Retry("last", "never"),
    WorkerLost: Retry("last", "always"),
    Overloaded: Retry("last", "new"),
    NotReady: Retry("last", "new"),
    HandoffStalled: Retry("source", "always", "local prefill"),
    HandoffFailed: Retry("source", "always"),
    NotResumable: Retry("none", "never", "replay"),
}
"""By error, of which the most specific class counts. Other errors end the request."""


class Progress:
    """The state of one request across its attempts. `error` is how the last one ended; `num_ids` is how many
    token ids the model has; `usage` is the latest that a worker reported; `leg` records the attempts."""

    def __init__(self, request: GenerateRequest, num_ids: float, leg: Leg | None = None) -> None:
        self.request = request
        self.num_ids = num_ids
        self.token_ids: list[int] = []
        self.usage: Usage | None = None
        self.last: WorkerInfo | None = None  # called in this attempt
        self.calls: list[Call] = []  # those that are open
        self.prefill: WorkerInfo | None = None  # whose handoff this attempt uses
        self.decode: WorkerInfo | None = None  # if it is chosen before prefill
        self.sent = request  # to the first worker of this attempt
        self.avoided: set[str] = set()
        self.leg = leg or Leg.since(time.perf_counter())
        self.error: BatonError | None = None
        self._is_refused = False  # by that error, for want of room
        self.modes: set[str] = set()  # of all retries so far
        self._expected: list[int] = []
        self._is_running = False  # decode workers got a handoff, or the client a token
        self._num_failures = 0
        self.pause_s = 0.0  # before another worker is tried
        self._num_tokens_before = 0
        self._deadline = asyncio.get_running_loop().time() + request.deadline_s

    @property
    def time_left_s(self) -> float:
        return self._deadline - asyncio.get_running_loop().time()

    def remaining(self) -> GenerateRequest:
        generated, prompt = self.token_ids, self.request.token_ids
        if "replay" in self.modes:
            self._expected, generated = generated.copy(), []
        token_ids, left_s = prompt + generated if generated else prompt, self.time_left_s
        self.sent = msgspec.structs.replace(
            self.request, token_ids=token_ids, num_generated=len(generated), deadline_s=left_s
        )
        return self.sent

    def take(self, chunk: TokenChunk) -> TokenChunk | None:
        """Keep the chunk's tokens and usage; returns the tokens that are new to the client, or None. Raises
        UnknownToken, or EngineFailure if a regenerated answer diverges."""
        if chunk.token_ids and max(chunk.token_ids) >= self.num_ids:
            raise UnknownToken
        if chunk.usage is not None:
            self.usage = chunk.usage
        if self._expected:
            num = min(len(chunk.token_ids), len(self._expected))
            is_cut = chunk.finish_reason is not None and num < len(self._expected)
            if is_cut or list(chunk.token_ids[:num]) != self._expected[:num]:
                raise EngineFailure(_DIVERGED)
            del self._expected[:num]
            logprobs = None if chunk.logprobs is None else chunk.logprobs[num:]
            chunk = msgspec.structs.replace(chunk, token_ids=chunk.token_ids[num:], logprobs=logprobs)
            if not chunk.token_ids and chunk.finish_reason is None:
                return None
        self.token_ids += chunk.token_ids
        return chunk

    async def close(self) -> None:
        """Close the attempt's calls, the last first, even if one fails."""
        try:
            while self.calls:
                await self.calls.pop().close()
        finally:
            if self.calls:
                await self.close()

    def note_failure(self, error: BatonError) -> None:
        """Prepare the next attempt. Raises the error if there is none; DeadlineExceeded if it is too late."""
        retry = next((RETRIES[kind] for kind in type(error).__mro__ if kind in RETRIES), None)
        if retry is None or (retry.mode == "replay" and "replay" in self.modes):
            raise error
        if self.time_left_s <= 0:
            raise DeadlineExceeded
        self.pause_s = 0.0
        self._is_running |= bool(self.token_ids) or self.prefill not in {None, self.last}
        if retry.counts != "never":
            if len(self.token_ids) - self._num_tokens_before >= _ENOUGH_TOKENS:
                self._num_failures = 0
                self.avoided.clear()
            self._num_tokens_before = len(self.token_ids)
            is_counted = retry.counts == "always" or not self._is_running
            self._num_failures += is_counted
            if self._num_failures == MAX_ATTEMPTS:
                raise error
            if is_counted and self._num_failures > 1:
                self.pause_s = _NOTICED_S
        source = self.prefill if retry.excludes == "source" else None
        if retry.excludes != "none" and (worker := source or self.last) is not None:
            self.avoided.add(worker.incarnation)
        self.modes.add(retry.mode)
        self.last = self.prefill = self.decode = None
        self.error, self._is_refused = error, retry.counts == "new"

    async def clear_avoided(self) -> None:
        """Avoid no worker, after a backoff. Raises the last error if it refused a new request."""
        pause_s = _BACKOFF_S * 2**self._num_failures  # so that failing at once does not spin
        if self.error is not None and self._is_refused:
            if not self._is_running:
                raise self.error
            pause_s = self.error.retry_after_s or 1.0  # until a queue may have room
        await asyncio.sleep(pause_s)  # a backoff
        self.avoided.clear()


_Stream = tuple[Reply | None, AsyncGenerator[Reply, None]]
"""A worker's first reply and the rest."""


class Generator:
    """Answers token requests with the fleet's workers. If one is lost, another one resumes, or replays the
    answer; no token is repeated or missing. Without a live worker, or the broker, a request waits."""

    def __init__(
        self,
        transport: Transport,
        fleet: Fleet,
        settings: RoutingSettings,
        metrics: Metrics,
        num_processes: int = 1,
    ) -> None:
        """`num_processes` of this frontend share the workers."""
        self._transport = transport
        self._fleet = fleet
        self._metrics = metrics
        self._settings = settings
        self._num_processes = num_processes
        self._admissions: dict[str, Admission] = {}
        self._num_running = fleet.calls.num_running
        self._router = Router(settings.router_mode, self._num_running, metrics)
        metrics.at_scrape.append(self._note_places)
        metrics.at_scrape.append(partial(fleet.note_workers, metrics))

    def _note_places(self) -> None:
        of, by_caller = self._metrics.of, list[int]()
        for model in {worker.model for worker in self._fleet.table.live()} | self._admissions.keys():
            self._metrics.expect(model)
            admission = self._admission(model)
            by_caller += [len(turns) for users in admission.waiting.values() for turns in users.values()]
            for kind, (num_taken, num_places) in admission.places().items():
                of("taken_places", model, kind).value = num_taken
                if num_places < math.inf:
                    of("places", model, kind).value = num_places
        of("queue_callers").value = len(by_caller)
        of("queue_largest_caller_requests").value = max(by_caller, default=0)

    def check(self, model: str, caller: str, deadline_s: float) -> None:
        """Raises Overloaded if `generate` would, before work is spent on the prompt."""
        self._admission(model).check(caller, deadline_s)

    async def generate(
        self,
        request: GenerateRequest,
        caller: str = "",
        on_taken: Callable[[], None] = lambda: None,
        leg: Leg | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """The answer's chunks; `leg` records how they came. If the workers are full, it waits for the
        caller's turn; then it calls `on_taken`. Raises a BatonError: NoWorkers, Overloaded, ..."""
        progress = Progress(request, self._fleet.num_token_ids(request.model), leg)
        admission = self._admission(request.model)
        place = await admission.enter(request, caller)
        try:
            while True:
                await self._find_workers(progress, on_taken)
                try:
                    reply, rest = await self._start(progress)
                    if isinstance(reply, KvHandoff):
                        if reply.first_chunk is not None:
                            admission.start(place)
                            if fresh := progress.take(reply.first_chunk):
                                yield fresh
                        reply, rest = await self._hand_over(progress, reply)
                    admission.start(place)
                    while isinstance(reply, TokenChunk):
                        if (fresh := progress.take(reply)) is not None:
                            yield fresh
                        if reply.finish_reason:
                            return
                        reply = await anext(rest, None)
                    raise WorkerLost("The worker ended the stream before the answer was complete.")
                except BatonError as error:
                    self._note_failure(error, progress)
                finally:
                    await progress.close()
        except Overloaded:
            raise admission.refusal("workers") from None
        finally:
            admission.leave(place)
            progress.leg.end(progress.usage)

    def _note_failure(self, error: BatonError, progress: Progress) -> None:
        """Record a failed attempt. Raises the error if the request cannot be retried."""
        attempt = progress.leg.failed(error.code, len(progress.token_ids))
        is_prefills = isinstance(error.__cause__, WorkerLost)  # while decode waited for its KV
        worker = progress.prefill if is_prefills else progress.last
        if worker and (is_prefills or isinstance(error, WorkerLost)):
            is_invalid = isinstance(error, UnknownToken)
            self._fleet.table.note(worker, "invalid" if is_invalid else "lost", error.message)
        if isinstance(error, HandoffStalled) and progress.prefill and progress.last:
            self._fleet.cut.add(progress.prefill, progress.last)
        progress.note_failure(error)
        fields = {"request_id": progress.request.request_id, "attempt": len(progress.leg.attempts)}
        fields |= {"worker": worker.label if worker else "", "reason": error.code}
        log.warning(Line("retrying", **fields, waited_s=round(attempt.waited_s, 3), detail=error.message))

    def _admission(self, model: str) -> Admission:
        if model not in self._admissions:
            self._admissions[model] = Admission(
                partial(self._capacity, model),
                self._metrics,
                self._settings.max_wait_s,
                lambda pool, load: self._fleet.events.full(f"{pool} pool of {model}", load),
            )
        return self._admissions[model]

    def _capacity(self, model: str, num_decoding: int) -> Capacity:
        """The places of the workers, besides those of requests on workers that are leaving."""
        prefills, decodes = [self._fleet.workers(model, role) for role in (Role.PREFILL, Role.DECODE)]
        capacity = capacity_of(prefills, decodes, self._num_processes)
        num_leaving = num_decoding - sum([self._num_running[worker.worker_id] for worker in decodes])
        return capacity._replace(num_running=capacity.num_running + max(num_leaving, 0))

    async def _find_workers(self, progress: Progress, on_taken: Callable[[], None]) -> None:
        """Wait for the plane's broker, until the deadline if the request was running when it went away; then
        for a decode worker that may get the request. `on_taken` is called before the first attempt. Raises
        DeadlineExceeded."""
        limit_s = self._settings.wait_for_worker_s
        if progress.pause_s and self._eligible(Role.DECODE, progress):
            await asyncio.sleep(progress.pause_s)  # a backoff
            if progress.time_left_s <= 0:
                raise DeadlineExceeded
        if not self._transport.is_reachable:
            away = BrokerLost("The request plane's broker is unreachable; retry later.", retry_after_s=1)
            await _wait(progress, self._transport.reachable(), math.inf if progress.error else limit_s, away)
        if not self._eligible(Role.DECODE, progress):
            await _wait(progress, self._decode_worker(progress), limit_s, _no_decode(progress))
        if progress.error is None:
            on_taken()

    async def _decode_worker(self, progress: Progress) -> None:
        while not self._eligible(Role.DECODE, progress):
            if self._fleet.workers(progress.request.model, Role.DECODE):
                await progress.clear_avoided()  # all that are live have failed this request
            else:
                await self._fleet.table.change.wait()

    async def _start(self, progress: Progress) -> _Stream:
        """Send the remaining request to workers: a handoff, or an answer without one, if that is short or
        decode computes the prompt."""
        request, settings, reason = progress.remaining(), self._settings, "always"
        if settings.local_prefill_tokens:
            progress.decode = self._choose(Role.DECODE, progress)
        prefill = self._choose(Role.PREFILL, progress, progress.decode)
        if prefill is None:
            reason = "stalled" if "local prefill" in progress.modes else "no_prefill_worker"
            self._metrics.of("prefills", "decode", reason).value += 1
            return await self._decode(request, progress)
        if progress.decode is not None:
            reason = "free"
            if self._fleet.calls.longest_wait_s(prefill) >= settings.local_prefill_after_s:
                local = msgspec.structs.replace(request, local_prefill_tokens=settings.local_prefill_tokens)
                first, tokens = await self._decode(local, progress)
                if not isinstance(first, PrefillFirst):
                    self._metrics.of("prefills", "decode", "cached").value += 1
                    return first, tokens
                await progress.calls.pop().close()
                reason = "busy" if first.is_busy else "long"
        self._metrics.of("prefills", "prefill", reason).value += 1
        return await self._prefill(request, prefill, progress)

    async def _prefill(self, request: GenerateRequest, prefill: WorkerInfo, progress: Progress) -> _Stream:
        """What the prefill worker answers: a handoff, or the whole answer if that is so short."""
        progress.prefill = prefill
        arrived: list[Reply | None] = []
        call = self._call(prefill, request, progress, arrived)
        first = await anext(call.replies, None)
        arrived.append(first)
        call.answered()
        if not isinstance(first, KvHandoff | TokenChunk):
            raise HandoffFailed(f"Prefill worker {prefill.worker_id} did not send a handoff.")
        if isinstance(first, KvHandoff) and first.first_token >= progress.num_ids:
            raise UnknownToken
        progress.leg.answered(first)
        return first, call.replies

    async def _hand_over(self, progress: Progress, handoff: KvHandoff) -> _Stream:
        """Decode what prefill hands over. The prefill call stays open until decode's first chunk, since not
        every engine reports when the KV has moved, and closing the call releases the pinned KV."""
        pinning = progress.calls[-1]
        stream = await self._decode(after_handoff(progress.sent, handoff), progress, pinning)
        if progress.prefill and progress.last:
            self._fleet.handoffs[progress.prefill.worker_id, progress.last.worker_id] += 1
        progress.calls.remove(pinning)
        await pinning.close()
        return stream

    async def _decode(
        self, request: GenerateRequest, progress: Progress, pinning: Call | None = None
    ) -> _Stream:
        """What a decode worker answers. Raises NoWorkers."""
        decode = progress.decode or self._choose(Role.DECODE, progress, progress.prefill)
        if decode is None:
            raise _no_decode(progress)
        tokens = self._call(decode, request, progress, progress.token_ids).replies
        first = await (_decoded(tokens, pinning) if pinning else anext(tokens, None))
        if not isinstance(first, PrefillFirst):
            progress.leg.answered(first)
        return first, tokens

    def _choose(self, role: Role, progress: Progress, peer: WorkerInfo | None = None) -> WorkerInfo | None:
        eligible = self._eligible(role, progress, peer)
        return self._router.pick(role, progress.request, eligible) if eligible else None

    def _eligible(self, role: Role, progress: Progress, peer: WorkerInfo | None = None) -> list[WorkerInfo]:
        if role is Role.PREFILL and "local prefill" in progress.modes:
            return []
        live = self._fleet.workers(progress.request.model, role, paired_with=peer)
        return [worker for worker in live if worker.incarnation not in progress.avoided]

    def _call(self, worker: WorkerInfo, request: GenerateRequest, progress: Progress, arrived: Sized) -> Call:
        progress.last = worker
        progress.leg.on(worker)
        replies = self._transport.call(worker.address, request)
        progress.calls.append(self._fleet.calls.begin(worker, replies, arrived))
        return progress.calls[-1]


def _no_decode(progress: Progress) -> NoWorkers:
    return NoWorkers(f"No decode worker is available for {progress.request.model}.", retry_after_s=1)


async def _wait(progress: Progress, arrival: Awaitable[None], limit_s: float, error: BatonError) -> None:
    """Raises the request's last error, or this one, after `limit_s`; DeadlineExceeded."""
    progress.leg.attempts[-1].absent = error.code
    try:
        async with asyncio.timeout(min(limit_s, progress.time_left_s)):
            await arrival
    except TimeoutError:
        if progress.time_left_s <= 0:
            raise DeadlineExceeded from None
        is_away = isinstance(progress.error, BrokerLost)
        raise (progress.error if progress.error and not is_away else error) from None


async def _decoded(tokens: AsyncGenerator[Reply, None], pinning: Call) -> Reply | None:
    """Decode's first reply. Raises HandoffFailed, or BrokerLost, as soon as the prefill call fails."""
    loop = asyncio.get_running_loop()  # `asyncio.create_task` is more calls
    arriving, moved = loop.create_task(_next(tokens)), loop.create_task(_next(pinning.replies))
    try:
        await first_done(arriving, moved)
        if not arriving.done() and (error := moved.exception()) is not None:
            if isinstance(error, BrokerLost):
                raise error
            failed = f"The prefill worker failed before the KV was transferred: {error}"
            raise HandoffFailed(failed) from error
        return await arriving
    finally:
        for task in (arriving, moved):
            if not task.done():
                task.cancel()
                await first_done(task)
        if not moved.cancelled():
            moved.exception()  # it is not the request's: asyncio would log it


async def _next(replies: AsyncGenerator[Reply, None]) -> Reply | None:
    return await anext(replies, None)
