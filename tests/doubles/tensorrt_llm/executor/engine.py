"""The double's engine thread: runs the embedded engine with TensorRT-LLM's traps."""

import asyncio
import dataclasses
import importlib
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from baton.errors import BatonError, HandoffFailed, InvalidRequest
from baton.messages import TokenChunk, Usage
from tensorrt_llm.executor.result import RequestOutput, RequestPerfMetrics, Response, timing_metrics
from tensorrt_llm.executor.translate import (
    FOREVER_S,
    Request,
    handoff_of,
    joined,
    params_of,
    request_of,
    response_of,
    stops_of,
)
from tensorrt_llm.executor.utils import CppExecutorError, RequestError
from tensorrt_llm.params import moves_kv_by_python
from tensorrt_llm.traps import TRAPS, hang
from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.engines.library.model_facts import read_model_facts
from workers.kv.transceiver import choose_transceiver

if TYPE_CHECKING:
    from workers.engines.embedded.engine import EmbeddedEngine

_POOL_TOKENS = 1 << 16


@dataclasses.dataclass
class Job:
    """One request on the engine's thread. `is_pinned`: its KV waits to be pulled, "in transmission"."""

    request: Request
    result: RequestOutput
    task: asyncio.Task[None] | None = None
    has_answered: bool = False
    is_pinned: bool = False
    held: list[TokenChunk] = dataclasses.field(default_factory=list)
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    metrics: RequestPerfMetrics | None = None


class Executor:
    """One embedded engine with its own thread and event loop. With attention DP its pool stands for those of
    all ranks."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._fatal_error: Exception | None = None
        self._jobs: dict[int, Job] = {}
        self._seen_ids: set[int] = set()
        self._responses_left = TRAPS.dies_after
        config = args.cache_transceiver_config
        timeout_ms = config.kv_transfer_timeout_ms if config is not None else None
        self._kv_timeout_s = timeout_ms / 1000 if timeout_ms is not None else FOREVER_S
        self._by_python = config is not None and moves_kv_by_python(config)
        time.sleep(TRAPS.loads_s)  # the model loads
        self._num_ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
        cache = args.kv_cache_config
        self._max_tokens = cache.max_tokens or _POOL_TOKENS
        self.num_blocks = self._max_tokens // cache.tokens_per_block
        self.max_seq_len = _max_seq_len(args, self.num_blocks * cache.tokens_per_block)
        self._engine = self._embedded()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="double-executor")
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result()
        except BaseException:  # re-raised after its thread has ended
            self.shutdown()
            raise

    def submit(self, job: Job) -> None:
        """Run a job; from the caller's thread."""
        self._loop.call_soon_threadsafe(self._start, job)

    def abort(self, request_id: int, was_answered: bool) -> None:
        """Stop a job; from the caller's thread. In the middle of a transfer this corrupts the engine."""
        self._loop.call_soon_threadsafe(self._abort, request_id, was_answered)

    def check_health(self) -> bool:
        """Whether no fatal error is recorded."""
        if TRAPS.health_hangs:
            hang()
        return self._fatal_error is None

    def is_shutdown(self) -> bool:
        """Whether the engine serves no more requests."""
        return self._fatal_error is not None

    def die(self, reason: str) -> None:
        """Fail fatally: the error is recorded and sent to every open request as its own (ErrorResponse in
        executor/result.py); later requests fail with "LLM is shutting down"."""
        self._fatal_error = CppExecutorError(reason)
        for job in list(self._jobs.values()):
            if job.task is not None:
                job.task.cancel()
            job.result.put(RequestError(reason))
        self._jobs.clear()

    def shutdown(self) -> None:
        """Blocks until the thread has ended."""
        if TRAPS.shutdown_hangs:
            hang()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.stop()

    def _start(self, job: Job) -> None:
        if job.request.kind == "context_only":
            self._check_context(job)
        self._jobs[job.request.request_id] = job
        job.task = self._loop.create_task(self._run(job))

    def _check_context(self, job: Job) -> None:
        disagg_id = job.request.params.disagg_request_id or 0
        if disagg_id in self._seen_ids:
            self.die("two requests have the same disagg_request_id: their KV is mixed up")
        self._seen_ids.add(disagg_id)

    def _abort(self, request_id: int, was_answered: bool) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.task is None:
            return
        if job.is_pinned and not was_answered:
            return  # a race: `_try_cancel_request` (py_executor.py) refuses
        if job.is_pinned or (job.request.kind == "generation_only" and not job.has_answered):
            self.die("a request was aborted during its KV transfer")  # #12313, #13713
            return
        job.task.cancel()
        job.result.put(Response([], finish_reason="cancelled"))

    async def _run(self, job: Job) -> None:
        try:
            _compile(job.request.sampling.guided_decoding)
            await (self._context(job) if job.request.kind == "context_only" else self._generation(job))
        except InvalidRequest as error:
            job.result.put(RequestError(str(error)))
        except RequestError as error:
            job.result.put(error)
        except HandoffFailed as error:
            if not job.is_pinned:
                # TensorRT-LLM notices a dead peer only by the timeout.
                await asyncio.sleep(self._kv_timeout_s)  # as it does
                request_id = job.request.request_id
                job.result.put(
                    RequestError(f"Error in kv cache transfer for generation request {request_id}: {error}")
                )
        except BatonError as error:
            self.die(str(error))
        finally:
            self._jobs.pop(job.request.request_id, None)

    async def _context(self, job: Job) -> None:
        await asyncio.sleep(len(job.request.token_ids) * TRAPS.prefill_s_a_token)  # it computes
        # TensorRT-LLM makes max_tokens 1; with 1 the embedded engine would have nothing to hand over.
        request = request_of(job.request, max_tokens=2, stops=stops_of(job.request))
        async with aclosing(self._engine.prefill(request)) as replies:
            async for reply in replies:
                if isinstance(reply, TokenChunk):
                    self._respond(job, reply, None)
                else:
                    job.is_pinned = True
                    params = None
                    if not TRAPS.gives_no_params:
                        params = params_of(job.request, reply, by_python=self._by_python)
                    spent = Usage(0, 0, 0, None, reply.waited_s, 0.0, reply.computed_s)
                    self._respond(job, TokenChunk((reply.first_token,), "length", spent), params)

    async def _generation(self, job: Job) -> None:
        asked = job.request
        num_left = self.max_seq_len - len(asked.token_ids)
        request = request_of(
            asked, max_tokens=min(asked.sampling.max_tokens, num_left), stops=stops_of(asked)
        )
        if asked.kind == "generation_only":
            request = msgspec.structs.replace(request, handoff=handoff_of(asked.params))
        async with aclosing(self._engine.decode(request)) as replies:
            async for chunk in replies:
                job.held.append(chunk)
                due = len(job.held) >= self._args.stream_interval or not job.has_answered
                if chunk.finish_reason is not None or (asked.streaming and due):
                    self._respond(job, joined(job.held), None)
                    job.held.clear()

    def _respond(self, job: Job, chunk: TokenChunk, params: Any) -> None:
        if self._responses_left == 0:
            self.die("injected death")
            return
        self._responses_left -= 1
        if job.metrics is None and chunk.usage is not None and job.request.sampling.return_perf_metrics:
            job.metrics = RequestPerfMetrics(timing_metrics(job.began_s, chunk.usage))
        response = response_of(job.request, chunk, params)
        job.result.put(dataclasses.replace(response, perf_metrics=job.metrics))
        job.has_answered = True

    def _embedded(self) -> "EmbeddedEngine":
        from workers.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415  slow to load, and --check does not need it

        args = self._args
        config, cache = args.cache_transceiver_config, args.kv_cache_config
        settings = EmbeddedSettings(
            max_batch_size=min(args.max_batch_size, args.max_num_tokens),
            max_num_tokens=args.max_num_tokens,
            max_seq_len=self.max_seq_len,
            max_queue_size=100_000,
            kv_cache_config=KvCacheSettings(
                tokens_per_block=cache.tokens_per_block,
                max_tokens=self._max_tokens * self._num_ranks,
                enable_block_reuse=False,
            ),
            cache_transceiver_config=CacheTransceiverSettings(
                kv_transfer_timeout_ms=round(self._kv_timeout_s * 1000)
            ),
        )
        return EmbeddedEngine(
            settings,
            model_path=Path(args.model),
            transceiver=choose_transceiver("TCP") if config is not None and config.backend else None,
        )


def _max_seq_len(args: Any, num_tokens: int) -> int:
    """Lowered to what fits, reported only in its log (KvCacheCreator, _torch/pyexecutor/_util.py)."""
    asked = args.max_seq_len or read_model_facts(Path(args.model)).context_length
    return min(asked, num_tokens)


def _compile(guided: Any) -> None:
    """Raise RequestError, as GuidedDecoder fails a request whose grammar does not compile."""
    if guided is None or guided.structural_tag is None:
        return
    xgrammar = importlib.import_module("xgrammar")  # takes seconds, and few tests need it
    try:
        xgrammar.Grammar.from_structural_tag(guided.structural_tag)
    except RuntimeError as error:
        raise RequestError(f"Guided decoding error: {error}") from error
