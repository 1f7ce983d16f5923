"""The embedded engine: transformers' gpt-oss behind the `Engine` protocol, with its own compute thread."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from baton.errors import DeadlineExceeded, HandoffFailed, NotReady, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.embedded.grammar import Grammars
from workers.engines.embedded.runner import VERSIONS, Runner
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Phase, Scheduler
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.embedded.steps import Call, StepLoop
from workers.engines.embedded.transfer import handoff_of, opened
from workers.kv.transceiver import CacheTransceiver


class EmbeddedEngine:
    """Continuous batching, prefill in pieces and paged KV on a CPU or one GPU.

    A prefill worker needs a `transceiver`, which the engine starts and closes. It copies the KV of a handoff
    into a contiguous buffer and keeps the blocks pinned while the copy is offered, so the pool's size bounds
    the copies too. A request gives the same tokens alone or batched, chunked or not, prefilled here or
    elsewhere: exactly in float32, up to rounding in bfloat16."""

    def __init__(
        self,
        settings: EmbeddedSettings,
        *,
        model_path: Path,
        transceiver: CacheTransceiver | None,
    ) -> None:
        self._settings = settings
        self._model_path = model_path
        self._transceiver = transceiver
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-compute")
        self._ttl_s = settings.cache_transceiver_config.kv_transfer_timeout_ms / 1000
        self._counts: Counter[str] = Counter()
        self._move_s = 0.0
        self._steps: StepLoop | None = None  # while running
        self._grammars: Grammars | None = None

    async def start(self) -> EngineInfo:
        """Load the checkpoint and warm up. Raises OSError, ValueError, ImportError."""
        if self._transceiver is not None:
            await self._transceiver.start()
        loop = asyncio.get_running_loop()
        on_device = self._transceiver is not None and self._transceiver.moves_device_memory
        runner = await loop.run_in_executor(self._thread, Runner, self._settings, self._model_path, on_device)
        self._grammars = await asyncio.to_thread(Grammars, self._model_path, runner.vocab_size)
        scheduler = Scheduler(
            self._settings,
            num_blocks=runner.pool.num_blocks,
            context_length=runner.context_length,
            vocab_size=runner.vocab_size,
        )
        max_calls = self._settings.max_batch_size + self._settings.max_queue_size
        self._steps = StepLoop(runner, self._thread, scheduler, max_calls)
        self._steps.start()
        return EngineInfo(
            engine="embedded",
            engine_version=VERSIONS,
            context_length=runner.context_length,
            kv_layout=runner.pool.layout,
            kv_transfer=self._transceiver.transport_name if self._transceiver is not None else "",
            max_batch_size=self._settings.max_batch_size,
            max_queue_size=self._settings.max_queue_size,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        async with self._call(request, hands_off=True) as call:
            first = await call.next_chunk()
            assert first is not None
            if first.finish_reason is not None:
                yield first
                return
            steps, transceiver = self._ready(), self._wire()
            give_back = steps.runner.staging.give_back
            buffer = await steps.on_thread(steps.runner.gather, call.sequence, undo=give_back)
            ticket = transceiver.offer(buffer)
            try:
                if call.sequence.phase is not Phase.PINNED:  # the deadline came first
                    await call.next_chunk()
                ttl_s = min(self._ttl_s, call.deadline.when() - asyncio.get_running_loop().time())
                self._counts["num_handoffs"] += 1
                yield handoff_of(call.sequence, first, ticket, steps.runner.pool.layout, ttl_s)
                try:
                    self._counts["kv_moved_bytes"] += await asyncio.wait_for(transceiver.moved(ticket), ttl_s)
                except TimeoutError:
                    self._counts["num_handoffs_expired"] += 1
                    raise HandoffFailed(f"no decode worker pulled the KV within {ttl_s:.3g} s") from None
            finally:
                transceiver.withdraw(ticket)
                give_back(buffer)

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with self._call(request, hands_off=False) as call:
            if request.handoff is not None:
                async with asyncio.timeout_at(call.deadline.when()):
                    await self._take_over(call, request.handoff)
            while (chunk := await call.next_chunk()) is not None:
                yield chunk

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        scheduler = self._ready().scheduler
        return scheduler.num_lacking(scheduler.sequence(request, hands_off=False))

    def stats(self) -> WorkerStats:
        steps = self._steps
        if steps is None:
            return WorkerStats()
        scheduler = steps.scheduler
        return WorkerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks=scheduler.ledger.num_blocks,
            kv_used_blocks=scheduler.ledger.num_used,
            kv_pinned_blocks=scheduler.ledger.num_pinned,
            kv_cached_blocks=scheduler.ledger.num_kept,
            kv_move_s=self._move_s,
            **self._counts,
            **scheduler.counts,
        )

    async def failed(self) -> str:
        """Wait until the compute thread fails, after which the pool's state is unknown."""
        return await asyncio.shield(self._ready().broke)

    async def stop(self) -> None:
        """End every call with WorkerLost, wait for the current step, free the model. Idempotent."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.stop(WorkerLost("the worker stopped during the request"))
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if self._transceiver is not None:
            await self._transceiver.close()
        if self._grammars is not None:
            self._grammars.close()
        self._grammars = None

    async def _take_over(self, call: Call, handoff: KvHandoff) -> None:
        """Pull the KV once the call has blocks, store it, and decode from the first token. A payload is in
        token order: the KV that is not cached is its end."""
        steps, transceiver, sequence = self._ready(), self._wire(), call.sequence
        runner, num_tokens, now_s = steps.runner, len(sequence.token_ids), asyncio.get_running_loop().time
        num_bytes = runner.pool.num_handoff_bytes(num_tokens)
        state = opened(handoff, layout=runner.pool.layout, num_tokens=num_tokens, num_bytes=num_bytes)
        if not 0 <= handoff.first_token < runner.vocab_size:
            raise HandoffFailed(
                f"first token {handoff.first_token} is not in the vocabulary of {runner.vocab_size}"
            )
        expires_at = now_s() + handoff.ttl_s
        try:
            async with asyncio.timeout_at(expires_at):
                await call.admitted.wait()
        except TimeoutError:
            raise HandoffFailed(f"the handoff's {handoff.ttl_s:.3g} s expired in the queue") from None
        if sequence.phase is not Phase.PULLING:
            return  # what ended the call is in its outbox
        staging, num_lacking = runner.staging, num_tokens - sequence.num_computed
        num_bytes = runner.pool.num_handoff_bytes(num_lacking)
        buffer = await steps.on_thread(staging.take, num_bytes, undo=staging.give_back)
        try:
            began_at = now_s()
            await transceiver.pull(state.ticket, buffer, expires_at - began_at)
            self._move_s += now_s() - began_at
            self._counts["kv_moved_bytes"] += buffer.num_bytes
            if sequence.phase is Phase.PULLING:  # otherwise the blocks may have a new owner
                await steps.on_thread(runner.scatter, buffer, sequence)
        finally:
            staging.give_back(buffer)
        if sequence.phase is Phase.PULLING:
            self._counts["num_handoffs"] += 1
            sequence.num_cached = state.num_cached_tokens
            sequence.num_moved_bytes = buffer.num_bytes
            steps.resume(call, Sampled(handoff.first_token, state.logprob))

    def _wire(self) -> CacheTransceiver:
        if self._transceiver is None:
            raise HandoffFailed("this worker has no transceiver: set cache_transceiver_config")
        return self._transceiver

    def _ready(self) -> StepLoop:
        if self._steps is None:
            raise NotReady("the engine is not running")
        return self._steps

    @asynccontextmanager
    async def _call(self, request: GenerateRequest, *, hands_off: bool) -> AsyncGenerator[Call, None]:
        """A call, open during the context. A TimeoutError is its deadline's."""
        sequence = self._ready().scheduler.sequence(request, hands_off=hands_off)
        deadline_at = asyncio.get_running_loop().time() + request.deadline_s
        try:
            if request.sampling.guided is not None:
                assert self._grammars is not None
                answer = sequence.token_ids[sequence.num_prompt :]
                async with asyncio.timeout_at(deadline_at):
                    sequence.matcher = await self._grammars.matcher(request.sampling.guided, answer)
                sequence.spent.lap("computed_s")
            steps = self._ready()  # may have been stopped meanwhile
            call = steps.open(request, sequence, deadline_at)
            try:
                yield call
            finally:
                steps.close(call)
        except TimeoutError:
            raise DeadlineExceeded from None
