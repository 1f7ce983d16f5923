"""The double's engine core: requests and pins, on a thread that stands for vLLM's processes."""

import asyncio
import concurrent.futures
import dataclasses
import importlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from baton.errors import BatonError, HandoffFailed, WorkerLost
from baton.messages import GenerateRequest, KvHandoff, TokenChunk
from vllm.distributed.kv_transfer import Connector, set_kv_transfer_group
from vllm.outputs import RequestStateStats, SchedulerStats
from vllm.v1.engine.embedded import embedded_engine, lease_s, nixl_params, opened
from workers.engines.embedded.transfer import HandoffState

_STEP_S = 0.002  # of a step that computes nothing
DIES_AFTER = "DOUBLE_VLLM_DIES_AFTER"  # the core dies after so many outputs


@dataclasses.dataclass
class Job:
    """A request in the core; `transfer` are its kv_transfer_params."""

    request_id: str
    request: GenerateRequest
    transfer: dict[str, Any]
    task: asyncio.Task[None] | None = None
    stats: RequestStateStats = dataclasses.field(
        default_factory=lambda: RequestStateStats(queued_ts=time.monotonic())
    )

    def answered(self, computed_s: float) -> RequestStateStats:
        """The stats, with the first token's time unless it was before."""
        if not self.stats.first_token_ts:
            self.stats.first_token_ts = time.monotonic()
            self.stats.scheduled_ts = self.stats.first_token_ts - computed_s
        return self.stats


@dataclasses.dataclass
class Output:
    """What a step adds to a request; a finish reason ends it."""

    request_id: str
    chunk: TokenChunk
    finish_reason: str | None
    num_cached_tokens: int = 0
    transfer: dict[str, Any] | None = None
    stats: RequestStateStats | None = None


class Core:
    """`deliver` gets each step's outputs and stats, `died` is called once; both on this thread."""

    def __init__(
        self, config: Any, deliver: Callable[[list[Output], SchedulerStats], None], died: Callable[[], None]
    ) -> None:
        self._config = config
        self._deliver = deliver
        self._died = died
        self._jobs: dict[str, Job] = {}
        self._pins: dict[str, asyncio.Task[None]] = {}  # finished requests whose KV is kept
        self._leaseless: list[str] = []  # those that the worker does not know
        self._pulled: set[str] = set()
        self._garbage: set[tuple[int, str]] = (
            set()
        )  # in the prefix cache, by the prompt's first token and salt
        self._reported_move = (0, 0.0)
        self._outputs_left = int(os.environ.get(DIES_AFTER, "-1"))
        self._connector = Connector()
        self._worker = _worker(config.args.worker_extension_cls)
        self._engine = embedded_engine(config)
        self._is_dead = False
        self._stepping: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="double-core")
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:  # re-raised after its thread has ended
            self.shutdown()
            raise

    def add(self, job: Job) -> None:
        """Run a request; from the caller's thread, like the methods below."""
        self._loop.call_soon_threadsafe(self._add, job)

    def abort(self, request_id: str) -> None:
        """End a request. KV that is already kept stays."""
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def call(self, method: str, args: tuple[Any, ...]) -> concurrent.futures.Future[Any]:
        """Call a method of the worker, in its process."""

        async def run() -> Any:
            return getattr(self._worker, method)(*args)

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def die(self) -> None:
        """Die, as by kill -9."""
        self._loop.call_soon_threadsafe(self._die, "killed")

    def shutdown(self) -> None:
        """Blocks until the thread has ended."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        if self._config.kv_transfer_config is not None:
            set_kv_transfer_group(self._connector)
        await self._engine.start()
        self._stepping = asyncio.create_task(self._steps())

    async def _stop(self) -> None:
        tasks = [self._stepping, *(job.task for job in self._jobs.values()), *self._pins.values()]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engine.stop()

    def _add(self, job: Job) -> None:
        if self._is_dead:
            return
        self._jobs[job.request_id] = job
        job.task = self._loop.create_task(self._run(job))
        self._wake.set()

    def _abort(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.task is not None:
            job.task.cancel()

    def _die(self, reason: str) -> None:
        self._is_dead = True
        print(f"the double of vLLM is dead: {reason}", flush=True)  # noqa: T201  as vLLM's core logs its trace
        for request_id in list(self._jobs):
            self._abort(request_id)
        self._died()

    async def _run(self, job: Job) -> None:
        try:
            if job.transfer.get("do_remote_decode"):
                await self._prefill(job)
            else:
                await self._decode(job)
        except HandoffFailed as error:
            await self._pull_failed(job, error)
        except BatonError as error:
            self._die(f"{job.request_id}: {error}")
        finally:
            self._jobs.pop(job.request_id, None)
            if job.request_id not in self._pins:
                self._connector.connector_worker._reqs_to_process.discard(job.request_id)  # noqa: SLF001  the core is its process
            self._step([])

    async def _prefill(self, job: Job) -> None:
        self._connector.connector_worker._reqs_to_process.add(job.request_id)  # noqa: SLF001  the core is its process
        sampling = job.request.sampling
        # The embedded engine ends an answer of one token, or at a stop token, without a handoff.
        stops = sampling.stop_token_ids if sampling.min_tokens > job.request.num_generated else ()
        num_tokens = job.request.num_generated + 2
        asked = msgspec.structs.replace(sampling, max_tokens=num_tokens, stop_token_ids=stops)
        replies = self._engine.prefill(msgspec.structs.replace(job.request, sampling=asked))
        try:
            handoff = await anext(replies)
        except BaseException:  # re-raised after the call is closed
            await replies.aclose()
            raise
        if not isinstance(handoff, KvHandoff):
            raise NotImplementedError("the double hands no answer over that the context ends")
        self._pins[job.request_id] = asyncio.create_task(self._keep(job.request_id, replies))
        self._leaseless.append(job.request_id)
        state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
        logprobs = (state.logprob,) if state.logprob is not None else None
        chunk = TokenChunk((handoff.first_token,), None, None, logprobs)
        reason = "stop" if handoff.first_token in sampling.stop_token_ids else "length"
        params = nixl_params(self._config, job.request_id, handoff)
        self._step([Output(job.request_id, chunk, reason, 0, params, job.answered(handoff.computed_s))])

    async def _keep(self, request_id: str, replies: AsyncGenerator[Any, None]) -> None:
        async with aclosing(replies):
            await anext(replies, None)
            self._pulled.add(request_id)

    async def _decode(self, job: Job) -> None:
        request = job.request
        num_cached = len(request.token_ids) - self._engine.num_lacking_tokens(request)
        if (request.token_ids[0], request.cache_salt) in self._garbage:
            self._die(f"GARBAGE: {job.request_id} found what a failed pull had left in the prefix cache")
            return
        begins_with = 0
        if job.transfer.get("do_remote_prefill"):
            num_cached = job.transfer["remote_num_tokens"]
            begins_with = len(request.token_ids) - num_cached
            request = await (self._with_given_first(job) if begins_with else self._with_own_first(job))
        async with aclosing(self._engine.decode(request)) as chunks:
            async for chunk in chunks:
                if begins_with:
                    begins_with = 0  # the prompt's last token, which the embedded engine emits, too
                    continue
                stats = job.answered(chunk.usage.computed_s if chunk.usage else 0.0)
                self._step([Output(job.request_id, chunk, chunk.finish_reason, num_cached, None, stats)])

    async def _with_given_first(self, job: Job) -> GenerateRequest:
        """The prompt goes on after the kept KV, with a token that prefill sampled."""
        *token_ids, first = job.request.token_ids
        num_generated = max(0, job.request.num_generated - 1)
        num_more = 1 - (job.request.num_generated - num_generated)
        sampling = msgspec.structs.replace(
            job.request.sampling, max_tokens=job.request.sampling.max_tokens + num_more
        )
        return msgspec.structs.replace(
            job.request,
            token_ids=token_ids,
            num_generated=num_generated,
            sampling=sampling,
            handoff=msgspec.structs.replace(opened(job.transfer), first_token=first),
        )

    async def _with_own_first(self, job: Job) -> GenerateRequest:
        """vLLM recomputes the prompt's last token and samples the first token itself. Here it recomputes the
        whole prompt."""
        sampling = msgspec.structs.replace(job.request.sampling, max_tokens=job.request.num_generated + 1)
        async with aclosing(
            self._engine.decode(msgspec.structs.replace(job.request, sampling=sampling))
        ) as chunks:
            first = await anext(chunks)
        handoff: KvHandoff = opened(job.transfer)
        state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
        state = msgspec.structs.replace(state, logprob=first.logprobs[0] if first.logprobs else None)
        handoff = msgspec.structs.replace(
            handoff, first_token=first.token_ids[0], engine_state=msgspec.msgpack.encode(state)
        )
        return msgspec.structs.replace(job.request, handoff=handoff)

    async def _pull_failed(self, job: Job, error: HandoffFailed) -> None:
        """A failed transfer is counted; with the hybrid KV manager that is all, and the answer is garbage. A
        pull of freed KV is not even counted; here it ends the engine."""
        if not isinstance(error.__cause__, OSError | WorkerLost):
            self._die(f"GARBAGE: {job.request_id} pulled KV that had been freed: {error}")
            return
        self._step([], failed=1)
        if self._config.args.disable_hybrid_kv_cache_manager:
            self._step([Output(job.request_id, TokenChunk(()), "error")])
            return
        if self._config.args.enable_prefix_caching is not False:
            # The next step begins before an abort can arrive.
            self._garbage.add((job.request.token_ids[0], job.request.cache_salt))
        await asyncio.sleep(_STEP_S)  # a step of the engine
        self._step([Output(job.request_id, TokenChunk((0, 0, 0)), "length")])

    async def _steps(self) -> None:
        while True:
            await self._wake.wait()
            while self._jobs or self._pins:
                await asyncio.sleep(_STEP_S)  # a step of the engine
                await self._free_finished()
                self._step([])
            self._wake.clear()

    async def _free_finished(self) -> None:
        worker = self._connector.connector_worker
        for request_id in worker.get_finished(self._pulled):
            self._leaseless = [i for i in self._leaseless if i != request_id]
            pin = self._pins.pop(request_id)
            pin.cancel()
            await asyncio.wait([pin])
            self._pulled.discard(request_id)
        for request_id in self._leaseless:
            worker._reqs_to_send[request_id] = time.perf_counter() + lease_s(self._config)  # noqa: SLF001  the core is its process
        self._leaseless.clear()

    def _step(self, outputs: list[Output], *, failed: int = 0) -> None:
        if self._is_dead:
            return
        if outputs and self._outputs_left == 0:
            self._die("injected death")
            return
        self._outputs_left -= len(outputs)
        stats = self._engine.stats()
        self._deliver(
            outputs,
            SchedulerStats(
                num_running_reqs=stats.num_running,
                num_waiting_reqs=stats.num_waiting,
                kv_cache_usage=(stats.kv_used_blocks + stats.kv_pinned_blocks) / max(1, stats.kv_blocks),
                kv_connector_stats=self._moved((stats.kv_moved_bytes, stats.kv_move_s), failed),
            ),
        )

    def _moved(self, now: tuple[int, float], failed: int) -> dict[str, Any] | None:
        """NIXL's stats of the pulls since the last step; only the pulling side has any."""
        (num_bytes, move_s), self._reported_move = self._reported_move, now
        moved = [now] if now[1] != move_s else []
        if not moved and not failed:
            return None
        return {
            "bytes_transferred": [total - num_bytes for total, _ in moved],
            "transfer_duration": [total_s - move_s for _, total_s in moved],
            "num_failed_transfers": [1] * failed,
        }


def _worker(extension: str) -> Any:
    """The GPU worker, with the extension class as an additional base."""
    bases: tuple[type, ...] = ()
    if extension:
        module, _, name = extension.rpartition(".")
        bases = (getattr(importlib.import_module(module), name),)
    return type("Worker", bases, {})()
