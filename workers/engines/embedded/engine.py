"""The embedded engine: transformers' gpt-oss behind the `Engine` protocol, with its own compute thread."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from baton.errors import DeadlineExceeded, NotReady, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, Role, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.embedded.grammar import Grammars
from workers.engines.embedded.runner import VERSIONS, Runner
from workers.engines.embedded.scheduler import Scheduler, Sequence, new_sequence
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.embedded.steps import Call, StepLoop
from workers.engines.embedded.transfer import Transfers
from workers.kv.transceiver import CacheTransceiver


class EmbeddedEngine:
    """Continuous batching, prefill in pieces and paged KV on a CPU or one GPU.

    A prefill worker needs a `transceiver`, which the engine starts and closes. A request gives the same
    tokens alone or batched, chunked or not, prefilled here or elsewhere: exactly in float32, up to rounding
    in bfloat16.
    """

    def __init__(
        self,
        settings: EmbeddedSettings,
        *,
        model_path: Path,
        role: Role,
        transceiver: CacheTransceiver | None,
    ) -> None:
        if role is Role.PREFILL and transceiver is None:
            raise ValueError("a prefill worker needs a transceiver: set cache_transceiver_config")
        self._settings = settings
        self._model_path = model_path
        self._transceiver = transceiver
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-compute")
        self._transfers: Transfers | None = None
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
            self._settings, num_blocks=runner.pool.num_blocks, context_length=runner.context_length
        )
        max_calls = self._settings.max_batch_size + self._settings.max_queue_size
        steps = StepLoop(runner, self._thread, scheduler, max_calls)
        ttl_s = self._settings.cache_transceiver_config.kv_transfer_timeout_ms / 1000
        self._transfers = Transfers(steps, self._transceiver, ttl_s)
        steps.start()
        return EngineInfo(
            name="embedded",
            version=VERSIONS,
            context_length=runner.context_length,
            kv_layout=runner.pool.layout,
            kv_transfer=self._transceiver.transport_name if self._transceiver is not None else "",
            max_batch_size=self._settings.max_batch_size,
            max_queue_size=self._settings.max_queue_size,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Yield the handoff, or the finished answer. See `Engine.prefill`."""
        async with self._call(request, hands_off=True) as call:
            first = await call.next_chunk()
            assert first is not None
            if first.finish_reason is not None:
                yield first
                return
            async with aclosing(self._ready().hand_over(call, first)) as replies:
                async for handoff in replies:
                    yield handoff

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with self._call(request, hands_off=False) as call:
            if request.handoff is not None:
                async with asyncio.timeout_at(call.deadline.when()):
                    await self._ready().take_over(call, request.handoff)
            while (chunk := await call.next_chunk()) is not None:
                yield chunk

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        return self._ready().steps.scheduler.num_lacking(self._new_sequence(request, hands_off=False))

    def stats(self) -> WorkerStats:
        transfers = self._transfers
        if transfers is None:
            return WorkerStats()
        steps, scheduler = transfers.steps, transfers.steps.scheduler
        return WorkerStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks=scheduler.ledger.num_blocks,
            kv_used_blocks=scheduler.ledger.num_used,
            kv_pinned_blocks=scheduler.ledger.num_pinned,
            kv_cached_blocks=scheduler.ledger.num_kept,
            num_prompt_tokens=steps.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=steps.num_generated_tokens,
            num_accepted_guesses=scheduler.num_accepted_guesses,
            num_rejected_guesses=scheduler.num_rejected_guesses,
            num_handoffs=transfers.num_handoffs,
            num_handoffs_expired=transfers.num_expired,
            kv_moved_bytes=transfers.moved_bytes,
            kv_move_s=transfers.move_s,
        )

    async def failed(self) -> str:
        """Wait until the compute thread fails, after which the pool's state is unknown."""
        steps = self._ready().steps
        await steps.broke.wait()
        return steps.reason

    async def stop(self) -> None:
        """End every call with WorkerLost, wait for the current step, free the model. Idempotent."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.steps.stop(WorkerLost("the worker stopped during the request"))
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if self._transceiver is not None:
            await self._transceiver.close()
        if self._grammars is not None:
            self._grammars.close()
        self._grammars = None

    def _ready(self) -> Transfers:
        if self._transfers is None:
            raise NotReady("the engine is not running")
        return self._transfers

    def _new_sequence(self, request: GenerateRequest, *, hands_off: bool) -> Sequence:
        runner = self._ready().steps.runner
        return new_sequence(
            request,
            context_length=runner.context_length,
            vocab_size=runner.vocab_size,
            hands_off=hands_off,
        )

    @asynccontextmanager
    async def _call(self, request: GenerateRequest, *, hands_off: bool) -> AsyncGenerator[Call, None]:
        """A call, open during the context. A TimeoutError is its deadline's."""
        sequence = self._new_sequence(request, hands_off=hands_off)
        deadline_at = asyncio.get_running_loop().time() + request.deadline_s
        try:
            if request.sampling.guided is not None:
                assert self._grammars is not None
                answer = sequence.token_ids[sequence.num_prompt :]
                async with asyncio.timeout_at(deadline_at):
                    sequence.matcher = await self._grammars.matcher(request.sampling.guided, answer)
                sequence.spent.lap("computed_s")
            steps = self._ready().steps  # may have been stopped meanwhile
            call = steps.open(request, sequence, deadline_at)
            try:
                yield call
            finally:
                steps.close(call)
        except TimeoutError:
            raise DeadlineExceeded from None
