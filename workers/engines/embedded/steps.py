"""The step loop: plans on the event loop, computes on the compute thread, delivers once per step."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from baton.errors import BatonError, DeadlineExceeded, Overloaded, WorkerLost
from baton.messages import FinishReason, GenerateRequest, TokenChunk, Usage
from workers.engines.embedded.runner import Runner
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Phase, Scheduler, Sequence, Step


@dataclass(slots=True, eq=False)
class Call:
    """`outbox` gets the answer's chunks, then the error that ended it or None. `admitted` is set once there
    are blocks for KV to be pulled, or the call has failed."""

    request: GenerateRequest
    sequence: Sequence
    deadline: asyncio.TimerHandle
    outbox: asyncio.Queue[TokenChunk | BatonError | None] = field(default_factory=asyncio.Queue)
    admitted: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_chunk(self) -> TokenChunk | None:
        """Wait for the next chunk; None at the end. Raises the error that ended the request."""
        item = await self.outbox.get()
        if isinstance(item, BatonError):
            raise item
        return item


T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_MASK_PATIENCE_S = 0.01


class StepLoop:
    """Owns the open calls and the scheduler; never uses torch.

    The compute thread runs one thing at a time, so a block may be freed while a step uses it: its next owner
    is computed after that step. A step waits briefly for the masks of guided answers, most of which take 0.1
    ms; an answer whose mask is late skips steps until it arrives, without delaying others again."""

    def __init__(
        self, runner: Runner, thread: ThreadPoolExecutor, scheduler: Scheduler, max_calls: int
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.broke: asyncio.Future[str] = asyncio.Future()  # the reason
        self._thread = thread
        self._max_calls = max_calls
        self._calls: dict[Sequence, Call] = {}
        self._wake = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._masks: set[asyncio.Future[None]] = set()  # for which the next step should wait

    def open(self, request: GenerateRequest, sequence: Sequence, deadline_at: float) -> Call:
        """Queue a sequence. Raises Overloaded if the queue is full, WorkerLost if the engine failed."""
        if self.broke.done():
            raise WorkerLost(self.broke.result())
        num_open = self.scheduler.num_running + self.scheduler.num_waiting
        if num_open >= self._max_calls:
            raise Overloaded(
                f"{num_open} requests are running or waiting; at most {self._max_calls} are allowed",
                retry_after_s=_RETRY_AFTER_S,
            )
        deadline = asyncio.get_running_loop().call_at(deadline_at, self._expire, sequence)
        call = Call(request, sequence, deadline)
        self._calls[sequence] = call
        self.scheduler.add(sequence)
        self._ask_mask(sequence)
        self._wake.set()
        return call

    def close(self, call: Call) -> None:
        """Remove everything of a call whose generator ended or was closed."""
        call.deadline.cancel()
        self.scheduler.remove(call.sequence)
        self._wake.set()
        self._calls.pop(call.sequence, None)

    def fail(self, call: Call, error: BatonError) -> None:
        """Remove the call's sequence, in any phase, and end its answer."""
        self.scheduler.remove(call.sequence)
        self._wake.set()
        call.outbox.put_nowait(error)
        call.admitted.set()

    def _fail_all(self, error: BatonError) -> None:
        for call in list(self._calls.values()):
            self.fail(call, error)

    def resume(self, call: Call, first: Sampled) -> None:
        """The prompt's KV has arrived: deliver its first token and continue with the second."""
        self._deliver(call, [first], self.scheduler.pulled(call.sequence, first.token_id))
        self._ask_mask(call.sequence)
        self._wake.set()

    async def on_thread(
        self, function: Callable[..., T], *args: object, undo: Callable[[T], object] = lambda _: None
    ) -> T:
        """Run something on the compute thread; an exception breaks the engine and becomes WorkerLost. If this
        is cancelled, it runs all the same, and then `undo` gets its result."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: work.cancelled() or work.exception() or undo(work.result()))
            raise
        if (error := work.exception()) is not None:
            self._break(error)
            raise WorkerLost(self.broke.result()) from error
        return work.result()

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name="embedded-steps")
        self._running.add_done_callback(self._ended)

    def stop(self, error: BatonError) -> None:
        """End every call with `error`. The current step goes on."""
        self._fail_all(error)
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        while not self.broke.done():
            if self._masks:
                await asyncio.wait(self._masks, timeout=_MASK_PATIENCE_S)
                self._masks.clear()
            step = self.scheduler.plan()
            for sequence in step.to_pull:
                sequence.spent.lap("waited_s")
                self._calls[sequence].admitted.set()
            if step.work:
                await self._step(step)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _step(self, step: Step) -> None:
        for work in step.work:
            if work.start == work.sequence.num_cached:  # its first
                work.sequence.spent.lap("waited_s")
        try:
            sampled = await self.on_thread(self.runner.step, step.work)
        except WorkerLost:
            return  # every call has failed
        for work, tokens in zip(step.work, sampled, strict=True):
            sequence = work.sequence
            if sequence.phase is not Phase.RUNNING:
                continue  # closed during the step
            num_prompt = max(0, min(len(work.token_ids), sequence.num_prompt - work.start))
            self.scheduler.counts["num_prompt_tokens"] += num_prompt
            reason = self.scheduler.advance(work, [token.token_id for token in tokens])
            if tokens:
                self._deliver(self._calls[sequence], tokens, reason)
                self._ask_mask(sequence)
                self.scheduler.counts["num_generated_tokens"] += len(tokens)

    def _ask_mask(self, sequence: Sequence) -> None:
        """Request the mask of the sequence's next token, if it is guided."""
        matcher = sequence.matcher
        if matcher is None or sequence.phase in (Phase.DONE, Phase.PINNED):
            return
        if sequence.pulls_kv and sequence.phase is not Phase.RUNNING:
            return  # its next token comes with the KV
        mask = matcher.follow(sequence.token_ids, sequence.num_prompt)
        mask.add_done_callback(lambda _: self._mask_came(sequence))
        if sequence.phase is Phase.RUNNING:
            self._masks.add(mask)

    def _mask_came(self, sequence: Sequence) -> None:
        assert sequence.matcher is not None
        if sequence.matcher.error is not None and sequence.phase is not Phase.DONE:
            self.fail(self._calls[sequence], sequence.matcher.error)
        self._wake.set()

    def _deliver(self, call: Call, tokens: list[Sampled], reason: FinishReason | None) -> None:
        sequence = call.sequence
        usage = None
        is_first = sequence.num_generated == call.request.num_generated + len(tokens)
        if is_first:
            sequence.spent.lap("moved_s" if sequence.pulls_kv else "computed_s")
        if is_first or reason is not None:
            usage = Usage(
                sequence.num_prompt,
                min(sequence.num_cached, sequence.num_prompt),
                sequence.num_generated,
                sequence.num_moved_bytes,
                *sequence.spent.parts,
            )
        logprobs = tuple(token.logprob for token in tokens if token.logprob is not None) or None
        scored = tuple(sequence.prompt_logprobs) if sequence.prompt_logprobs and reason is not None else None
        token_ids = tuple(token.token_id for token in tokens)
        call.outbox.put_nowait(TokenChunk(token_ids, reason, usage, logprobs, scored))
        if reason is not None:
            call.outbox.put_nowait(None)

    def _expire(self, sequence: Sequence) -> None:
        call = self._calls[sequence]
        if sequence.phase is Phase.DONE:
            return  # what ended it is in the outbox
        self.fail(call, DeadlineExceeded())

    def _ended(self, running: "asyncio.Task[None]") -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        _LOG.error("engine failed", exc_info=error)
        if not self.broke.done():
            self.broke.set_result(f"{type(error).__name__}: {error}")
        self._fail_all(WorkerLost(self.broke.result()))
