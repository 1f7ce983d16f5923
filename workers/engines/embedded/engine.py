"""The embedded engine: transformers' gpt-oss behind the `Engine` protocol, with its own compute thread."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import msgspec

from baton.errors import DeadlineExceeded, HandoffFailed, NotReady, WorkerLost
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
        self._steps: StepLoop | None = None
        self._transfers: Transfers | None = None
        self._grammars: Grammars | None = None
        self._stopped = False

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
        steps = self._steps = StepLoop(runner, self._thread, scheduler, max_calls)
        if self._transceiver is not None:
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
        steps, transfers = self._ready(), self._transfers
        if transfers is None:
            raise HandoffFailed("this worker has no transceiver: set cache_transceiver_config")
        call = await self._open(steps, request, hands_off=True)
        try:
            first = await call.next_chunk()
            assert first is not None
            if first.finish_reason is not None:
                yield first
                return
            async with aclosing(transfers.hand_over(call, first)) as replies:
                async for handoff in replies:
                    yield handoff
        finally:
            steps.close(call)

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        steps, handoff = self._ready(), request.handoff
        if handoff is not None and self._transfers is None:
            raise HandoffFailed("this worker has no transceiver: set cache_transceiver_config")
        call = await self._open(steps, request, hands_off=False)
        try:
            if handoff is not None and self._transfers is not None:
                async with asyncio.timeout_at(call.deadline.when()):
                    await self._transfers.take_over(call, handoff)
            while (chunk := await call.next_chunk()) is not None:
                yield chunk
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            steps.close(call)

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        return self._ready().scheduler.num_lacking(self._new_sequence(request, hands_off=False))

    def stats(self) -> WorkerStats:
        steps, transfers = self._steps, self._transfers
        if steps is None:
            return WorkerStats()
        ledger = steps.scheduler.ledger
        stats = WorkerStats(
            num_running=steps.scheduler.num_running,
            num_waiting=steps.scheduler.num_waiting,
            kv_blocks=ledger.num_blocks,
            kv_used_blocks=ledger.num_used,
            kv_pinned_blocks=ledger.num_pinned,
            kv_cached_blocks=ledger.num_kept,
            num_prompt_tokens=steps.num_prompt_tokens,
            num_cached_tokens=steps.scheduler.num_cached_tokens,
            num_generated_tokens=steps.num_generated_tokens,
            num_accepted_guesses=steps.scheduler.num_accepted_guesses,
            num_rejected_guesses=steps.scheduler.num_rejected_guesses,
        )
        if transfers is None:
            return stats
        return msgspec.structs.replace(
            stats,
            num_handoffs=transfers.num_handoffs,
            num_handoffs_expired=transfers.num_expired,
            kv_moved_bytes=transfers.moved_bytes,
            kv_move_s=transfers.move_s,
        )

    async def failed(self) -> str:
        """Wait until the compute thread fails, after which the pool's state is unknown."""
        assert self._steps is not None
        await self._steps.broke.wait()
        return self._steps.reason

    async def stop(self) -> None:
        """End every call with WorkerLost, wait for the current step, free the model. Idempotent."""
        self._stopped = True
        if self._steps is not None:
            self._steps.stop(WorkerLost("the worker stopped during the request"))
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        if self._transceiver is not None:
            await self._transceiver.close()
        if self._grammars is not None:
            self._grammars.close()
        self._steps = self._transfers = self._grammars = None

    def _ready(self) -> StepLoop:
        if self._steps is None or self._stopped:
            raise NotReady("the engine is not running")
        return self._steps

    def _new_sequence(self, request: GenerateRequest, *, hands_off: bool) -> Sequence:
        runner = self._ready().runner
        return new_sequence(
            request,
            context_length=runner.context_length,
            vocab_size=runner.vocab_size,
            hands_off=hands_off,
        )

    async def _open(self, steps: StepLoop, request: GenerateRequest, *, hands_off: bool) -> Call:
        sequence = self._new_sequence(request, hands_off=hands_off)
        if request.sampling.guided is None:
            return steps.open(request, sequence)
        assert self._grammars is not None
        answer = sequence.token_ids[sequence.num_prompt :]
        loop = asyncio.get_running_loop()
        deadline_at = loop.time() + request.deadline_s
        try:
            async with asyncio.timeout_at(deadline_at):
                sequence.matcher = await self._grammars.matcher(request.sampling.guided, answer)
        except TimeoutError:
            raise DeadlineExceeded from None
        sequence.spent.lap("computed_s")
        left = msgspec.structs.replace(request, deadline_s=deadline_at - loop.time())
        return self._ready().open(left, sequence)  # may have been stopped meanwhile
