"""A third-party library as an engine, in one role, behind an adapter."""

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NotReady,
    NotResumable,
    Overloaded,
    WorkerLost,
)
from baton.messages import NO_TOKEN, UNDECODABLE, GenerateRequest, KvHandoff, TokenChunk, WorkerStats
from baton.process import dying_at_once
from baton.telemetry import Line
from workers.engine import EngineInfo
from workers.engines.library.adapter import Adapter, Call
from workers.engines.library.settings import explained
from workers.engines.prefixes import Chain, HeldPrefixes
from workers.engines.requests import check_request, num_left

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_HELD_BLOCK = 64  # tokens
_WARM_UP_S = 600.0
_STUCK_AFTER_S = 600.0  # on top of the time that KV is kept: the request may first wait in a queue


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="engine-2"):
    """`KvHandoff.engine_state`: the library's own parameters, and the number of prompt tokens that prefill
    found in its cache, since decode counts the whole transferred prompt as cached."""

    num_cached_tokens: int
    params: dict[str, Any]

    def sealed(self) -> bytes:
        """Raises HandoffFailed for parameters that cannot be encoded."""
        try:
            return msgspec.msgpack.encode(self)
        except (TypeError, OverflowError) as error:
            raise HandoffFailed(f"the library's parameters cannot travel: {error}") from error


def opened(handoff: KvHandoff, num_tokens: int) -> Envelope:
    """The envelope of a handoff for a request of `num_tokens`. Raises HandoffFailed if it is for another."""
    name = f"the handoff of prefill worker {handoff.worker_id}"
    try:
        envelope = msgspec.msgpack.decode(handoff.engine_state, type=Envelope)
    except UNDECODABLE as error:
        raise HandoffFailed(f"{name} is not of a library: {error}") from error
    num_handed_over = handoff.num_prompt_tokens + (handoff.first_chunk is not None)
    if num_handed_over != num_tokens:
        raise HandoffFailed(f"{name} has {num_handed_over} tokens, the request {num_tokens}")
    return envelope


class LibraryEngine:
    """Prefill and decode on a third-party library.

    * No library reports when a handoff's KV has moved. `prefill` ends when it is closed, which the frontend
      does at decode's first chunk, or with HandoffFailed at the end of the handoff's time to live.
    * A library that may not abort a request during its KV transfer finishes it in the background, where it
      still occupies its slot."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._info = EngineInfo(engine="", engine_version=adapter.version, context_length=0)
        self._keep_s = 0.0
        self._held = HeldPrefixes(_HELD_BLOCK, 0)
        self._calls: set[Call] = set()
        self._numbers = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._num_failed_pulls = 0
        self._is_running = False
        self._broke = asyncio.Event()
        self._reason = ""
        self._watching: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        """Load and warm up; loading blocks the loop. Raises ValueError with one line for the user."""
        label, loaded = self.adapter.label, self.adapter.loaded
        log.info("loading model=%s with %s %s", loaded.settings["model"], label, self.adapter.version)
        try:
            with dying_at_once():
                self.adapter.load(self._fail_pulls)
        except ValueError as error:
            raise ValueError(explained(error, loaded, label)) from error
        except Exception as error:  # a library may fail in any way
            log.exception("%s did not start", label)
            raise ValueError(f"{label} did not start: {type(error).__name__}: {error}") from error
        self._watching = asyncio.create_task(self._watch(), name="library-health")
        try:
            async with asyncio.timeout(_WARM_UP_S):
                self._info, self._keep_s, num_reused_tokens = await self.adapter.start()
        except Exception as error:  # a library's first request may fail in any way
            reason = f"{label} loaded, but its first request failed: {error!r}"
            self._break_off(reason)
            raise ValueError(reason) from error
        self._held.max_blocks = num_reused_tokens // _HELD_BLOCK
        self._is_running = True
        return self._info

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        self._check(request, moves_kv=True)
        if num_left(request, self._info.context_length) == 1:  # nothing to hand over, so nothing is pinned
            async with aclosing(self.decode(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        async with self._opened(request, max_tokens=1, hands_over=True) as call:
            chunk = await self._step(call)
            self._note_prompt(call)
            if chunk.finish_reason == "stop":
                self._counts["num_generated_tokens"] += len(chunk.token_ids)
                yield chunk
                return
            handoff = self._handoff(call, chunk)
            yield handoff
            try:
                await call.wait(asyncio.Event().wait(), asyncio.get_running_loop().time() + handoff.ttl_s)
            except DeadlineExceeded:
                self._counts["num_handoffs_expired"] += 1
                raise HandoffFailed(f"no decode worker took the KV within {handoff.ttl_s:.3g} s") from None

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        self._check(request, moves_kv=request.handoff is not None)
        kept: dict[str, Any] = {}
        spare_s = 0.0  # after the kept KV has expired
        if request.handoff is not None:
            envelope = opened(request.handoff, len(request.token_ids))
            kept = {"transfer": envelope.params, "num_cached_tokens": envelope.num_cached_tokens}
            spare_s = max(0.0, request.deadline_s - request.handoff.ttl_s)
        max_tokens = num_left(request, self._info.context_length)
        async with self._opened(request, max_tokens=max_tokens, **kept) as call:
            call.deadline -= spare_s
            try:
                chunk = await self._step(call)
            except DeadlineExceeded:
                if not spare_s:
                    raise
                raise HandoffFailed("the KV did not arrive before the handoff expired") from None
            call.deadline += spare_s
            chain = self._note_prompt(call)
            generated: list[int] = []
            while True:
                self._counts["num_generated_tokens"] += len(chunk.token_ids)
                generated += chunk.token_ids
                if chunk.finish_reason:
                    self._held.hold(chain, [*request.token_ids, *generated[:-1]])
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
                chunk = await self._step(call)

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        """See `Engine.num_lacking_tokens`: an estimate, since no library's cache can be queried."""
        return len(request.token_ids) - self._held.num_held(request.token_ids, self._salt(request))

    def stats(self) -> WorkerStats:
        return replace(self.adapter.figures(self._calls), **self._counts)

    async def failed(self) -> str:
        """Wait until the library is dead, or raises an error that no request caused."""
        await self._broke.wait()
        return self._reason

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._is_running = False
        self._end_calls("the worker stopped while it held the request")
        await asyncio.gather(*self._leaving)
        await self.adapter.stop(is_broken=self._broke.is_set())

    def _check(self, request: GenerateRequest, *, moves_kv: bool) -> None:
        if not self._is_running:
            raise NotReady("the engine is not running")
        if self._broke.is_set():
            raise WorkerLost(self._reason)
        check_request(request, self.adapter.model.vocab_size, self._info.context_length)
        if request.num_generated and request.sampling.guided is not None:  # its grammar would start anew
            raise NotResumable(
                "the engine cannot go on in the middle of an answer with a demanded form; "
                "send the request again"
            )
        if moves_kv and not self._info.kv_transfer:
            raise HandoffFailed("this worker does not transfer KV: it runs with --disaggregation-mode agg")
        num_tokens, layout = len(request.token_ids), self._info.kv_layout
        longest = layout.max_handoff_tokens if layout is not None else None
        if moves_kv and longest is not None and num_tokens > longest:  # it would stall both sides
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; the KV of at most {longest} can be handed over"
            )
        num_open = sum(call.kept is None for call in self._calls)
        if num_open >= (self._info.max_batch_size or 0) + self._info.max_queue_size:
            raise Overloaded("the worker's queue is full; try again later", retry_after_s=_RETRY_AFTER_S)

    @asynccontextmanager
    async def _opened(
        self, request: GenerateRequest, *, max_tokens: int, **role: Any
    ) -> AsyncGenerator[Call, None]:
        """Submit the request; on exit it is over, aborted, or finished in the background."""
        call = Call(
            id=f"{request.request_id}-{next(self._numbers)}",
            request=request,
            max_tokens=max_tokens,
            deadline=asyncio.get_running_loop().time() + request.deadline_s,
            cache_salt=self._salt(request),
            num_lacking=functools.partial(self.num_lacking_tokens, request),
            **role,
        )
        try:
            self.adapter.submit(call)
        except WorkerLost as error:
            self._break_off(error.message)
            raise
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            if not await self.adapter.abort(call):
                self._calls.add(call)
                task = asyncio.create_task(self._finish(call), name=f"finish-{call.id}")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _step(self, call: Call) -> TokenChunk:
        try:
            chunk = await call.wait(self.adapter.step(call), call.deadline)
        except BatonError:
            raise
        except Exception as error:  # a library may raise anything
            failure = self.adapter.failure(error, call)
            if isinstance(failure, WorkerLost):
                self._break_off(failure.message)
            raise failure from error
        call.has_answered = True
        return chunk

    async def _finish(self, call: Call) -> None:
        """Wait for the first response of an abandoned call, then abort the rest.

        A transfer much longer than KV is kept has blocked TensorRT-LLM for good (issues 12313, 13713)."""
        now_s = asyncio.get_running_loop().time
        limit_s = self._keep_s + _STUCK_AFTER_S
        call.deadline = now_s() + limit_s
        try:
            await self._step(call)
        except BatonError as error:
            log.info(Line("abandoned request ended", request_id=call.id, error=repr(error)))
            # Not the library's; uvloop's timers are rounded to milliseconds, some are early.
            if isinstance(error, DeadlineExceeded) and now_s() > call.deadline - 1.0:
                self._break_off(f"request {call.id} did not end within {limit_s:g} s after it was abandoned")
        finally:
            self._calls.discard(call)
            await self.adapter.abort(call)

    def _note_prompt(self, call: Call) -> Chain:
        """Count the prompt of an answered call, and expect its KV in the cache."""
        if call.transfer is None:
            num_cached = call.num_cached_tokens or 0
            self._counts["num_prompt_tokens"] += len(call.request.token_ids) - num_cached
            self._counts["num_cached_tokens"] += num_cached
        else:
            self._counts["num_handoffs"] += 1
        chain = Chain(call.cache_salt)
        self._held.hold(chain, call.request.token_ids)
        return chain

    def _handoff(self, call: Call, first: TokenChunk) -> KvHandoff:
        if call.kept is None:
            raise HandoffFailed(f"{self.adapter.label} kept no KV for an unfinished answer")
        self._counts["num_handoffs"] += 1
        left_s = call.deadline - asyncio.get_running_loop().time()
        envelope = Envelope(num_cached_tokens=call.num_cached_tokens or 0, params=call.kept)
        return KvHandoff(
            first_token=first.token_ids[0] if first.token_ids else NO_TOKEN,  # decode yields it, too
            num_prompt_tokens=len(call.request.token_ids),
            ttl_s=max(0.0, min(self._keep_s, left_s)),
            engine_state=envelope.sealed(),
            first_chunk=replace(first, finish_reason=None) if call.is_continued else None,
            waited_s=call.spent.waited_s,
            computed_s=call.spent.computed_s,
        )

    def _salt(self, request: GenerateRequest) -> str:
        """What separates cached KV: the client's salt, and the failed pulls so far."""
        failed = self._num_failed_pulls
        return f"{request.cache_salt}\0{failed}" if failed else request.cache_salt

    def _fail_pulls(self) -> None:
        """A transfer has failed: end every request whose KV may not have arrived, and invalidate everything
        cached so far.

        The library caches what is in the failed one's blocks, and does not report which these are. This call
        precedes every token that was computed from them: a request that has answered did not use them."""
        self._num_failed_pulls += 1
        for call in self._calls:
            if not call.has_answered:
                call.end_with(HandoffFailed("the KV did not arrive: its source is gone or has dropped it"))

    async def _watch(self) -> None:
        self._break_off(await self.adapter.died())

    def _break_off(self, reason: str) -> None:
        """The library is dead: end every request with WorkerLost."""
        if self._broke.is_set():
            return
        log.error("engine broke reason=%s", reason)
        self._reason = reason
        self._broke.set()
        self._end_calls(reason)

    def _end_calls(self, reason: str) -> None:
        for call in self._calls:
            call.end_with(WorkerLost(reason))
