"""The double's engine thread: runs the embedded engine, and has TensorRT-LLM's ways of hurting its caller."""

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec

from baton.errors import BatonError, HandoffFailed, InvalidRequest
from baton.messages import GenerateRequest, KvHandoff, Role, Sampling, TokenChunk, TokenLogprob
from tensorrt_llm.executor.result import Logprob, RequestOutput, Response
from tensorrt_llm.executor.utils import CppExecutorError, RequestError
from tensorrt_llm.params import DisaggregatedParams
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.handoff import HandoffState
from workers.engines.embedded.settings import CacheTransceiverSettings, EmbeddedSettings, KvCacheSettings
from workers.kv.choose import choose_transceiver

_FOREVER_S = 1e6
_POOL_TOKENS = 1 << 16
DIES_AFTER = "DOUBLE_TRTLLM_DIES_AFTER"  # the engine dies after so many responses
LOADS_S = "DOUBLE_TRTLLM_LOADS_S"  # how long the constructor blocks


@dataclasses.dataclass
class Job:
    """One request on the engine's thread."""

    result: RequestOutput
    token_ids: list[int]
    sampling: Any
    streaming: bool
    kind: str
    params: Any
    task: asyncio.Task[None] | None = None
    has_answered: bool = False
    is_pinned: bool = False
    held: list[TokenChunk] = dataclasses.field(default_factory=list)


class Executor:
    """One embedded engine on a thread and an event loop of its own."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._fatal_error: Exception | None = None
        self._jobs: dict[int, Job] = {}
        self._seen_ids: set[int] = set()
        self._responses_left = int(os.environ.get(DIES_AFTER, "-1"))
        config = args.cache_transceiver_config
        timeout_ms = config.kv_transfer_timeout_ms if config is not None else None
        self._kv_timeout_s = timeout_ms / 1000 if timeout_ms is not None else _FOREVER_S
        time.sleep(float(os.environ.get(LOADS_S, "0")))  # the model loads
        self._engine = _embedded(args, self._kv_timeout_s)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="double-executor")
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result()
        except BaseException:  # raised again: its thread ends first
            self.shutdown()
            raise
        self.num_blocks = self._engine.stats().kv_blocks

    def submit(self, job: Job) -> None:
        """Run a job; from the caller's thread."""
        if self._fatal_error is not None:
            job.result.put(RuntimeError(f"the executor is broken: {self._fatal_error}"))
            return
        self._loop.call_soon_threadsafe(self._start, job)

    def abort(self, request_id: int) -> None:
        """Stop a job; from the caller's thread. In the middle of a transfer this corrupts the engine."""
        self._loop.call_soon_threadsafe(self._abort, request_id)

    def check_health(self) -> bool:
        """Whether nothing fatal is recorded."""
        return self._fatal_error is None

    def die(self, reason: str) -> None:
        """Break beyond repair: every open result raises, no new one is served."""
        self._fatal_error = CppExecutorError(reason)
        for job in list(self._jobs.values()):
            if job.task is not None:
                job.task.cancel()
            job.result.put(RuntimeError(f"the executor is broken: {reason}"))
        self._jobs.clear()

    def shutdown(self) -> None:
        """Blocks until the thread has ended."""
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
        if job.kind == "context_only" and (job.params.disagg_request_id or 0) in self._seen_ids:
            self.die("two requests have the same disagg_request_id: their KV is mixed up")
        if job.kind == "context_only":
            self._seen_ids.add(job.params.disagg_request_id or 0)
        self._jobs[job.result.request_id] = job
        job.task = self._loop.create_task(self._run(job))

    def _abort(self, request_id: int) -> None:
        job = self._jobs.get(request_id)
        if job is None or job.task is None:
            return
        if job.is_pinned or (job.kind == "generation_only" and not job.has_answered):
            self.die("a request was aborted during its KV transfer")
            return
        job.task.cancel()
        job.result.put(Response([], finish_reason="cancelled"))

    async def _run(self, job: Job) -> None:
        try:
            await (self._context(job) if job.kind == "context_only" else self._generation(job))
        except InvalidRequest as error:
            job.result.put(RequestError(str(error)))
        except HandoffFailed as error:
            if not job.is_pinned:
                # TensorRT-LLM learns of a dead peer by the timeout only.
                await asyncio.sleep(self._kv_timeout_s)  # as it does
                request_id = job.result.request_id
                job.result.put(
                    RequestError(f"Error in kv cache transfer for generation request {request_id}: {error}")
                )
        except BatonError as error:
            self.die(str(error))
        finally:
            self._jobs.pop(job.result.request_id, None)

    async def _context(self, job: Job) -> None:
        # TensorRT-LLM makes it 1; with 1 the embedded engine would have nothing to hand over. And it looks at
        # max_tokens before it looks at stop tokens other than end_id: those do not end it here.
        request = _request(job, max_tokens=2, stops=[job.sampling.end_id])
        async with aclosing(self._engine.prefill(request)) as replies:
            async for reply in replies:
                if isinstance(reply, TokenChunk):
                    params = DisaggregatedParams(
                        request_type="context_only", first_gen_tokens=[*reply.token_ids]
                    )
                    self._respond(job, reply, params)
                else:
                    job.is_pinned = True
                    self._respond(job, TokenChunk((reply.first_token,), "length"), _params(job, reply))

    async def _generation(self, job: Job) -> None:
        request = _request(job, max_tokens=job.sampling.max_tokens)
        if job.kind == "generation_only":
            request = msgspec.structs.replace(request, handoff=_handoff(job.params))
        replies: AsyncGenerator[TokenChunk, None] = self._engine.decode(request)
        async with aclosing(replies):
            async for chunk in replies:
                job.held.append(chunk)
                due = len(job.held) >= self._args.stream_interval or not job.has_answered
                if chunk.finish_reason is not None or (job.streaming and due):
                    self._respond(job, _joined(job.held), None)
                    job.held.clear()

    def _respond(self, job: Job, chunk: TokenChunk, params: Any) -> None:
        if self._responses_left == 0:
            self.die("injected death")
            return
        self._responses_left -= 1
        job.has_answered = True
        job.result.put(_response(job.sampling, chunk, params))


def _embedded(args: Any, kv_timeout_s: float) -> EmbeddedEngine:
    config, cache = args.cache_transceiver_config, args.kv_cache_config
    settings = EmbeddedSettings(
        max_batch_size=min(args.max_batch_size, args.max_num_tokens),
        max_num_tokens=args.max_num_tokens,
        max_seq_len=args.max_seq_len,
        max_queue_size=100_000,
        kv_cache_config=KvCacheSettings(
            tokens_per_block=cache.tokens_per_block, max_tokens=cache.max_tokens or _POOL_TOKENS
        ),
        cache_transceiver_config=CacheTransceiverSettings(kv_transfer_timeout_ms=round(kv_timeout_s * 1000)),
    )
    return EmbeddedEngine(
        settings,
        model_path=Path(args.model),
        role=Role.DECODE,
        worker_id="double",
        incarnation="double",
        transceiver=choose_transceiver("TCP") if config is not None and config.backend else None,
    )


def _request(job: Job, *, max_tokens: int, stops: list[int | None] | None = None) -> GenerateRequest:
    asked = job.sampling
    if stops is None:
        stops = [*(asked.stop_token_ids or ()), asked.end_id]
    bias = asked.embedding_bias
    sampling = Sampling(
        max_tokens=max_tokens,
        seed=asked.seed or 0,
        min_tokens=asked.min_tokens or 0,
        temperature=0.0 if asked.greedy else 1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        logit_bias={} if bias is None else {int(i): float(bias[i]) for i in bias.nonzero().flatten()},
        stop_token_ids=() if asked.ignore_eos else tuple(i for i in stops if i is not None and i >= 0),
        logprobs=asked.logprobs,
    )
    ignored = asked.prompt_ignore_length  # what penalties take for the prompt
    num_generated = 0 if ignored is None else max(0, len(job.token_ids) - ignored)
    sampling = msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens + num_generated,
        min_tokens=sampling.min_tokens and sampling.min_tokens + num_generated,
    )
    return GenerateRequest(
        request_id=str(job.result.request_id),
        model="double",
        token_ids=job.token_ids,
        sampling=sampling,
        deadline_s=_FOREVER_S,
        num_generated=num_generated,
    )


def _response(sampling: Any, chunk: TokenChunk, params: Any) -> Response:
    token_ids, stop_reason = list(chunk.token_ids), None
    if chunk.finish_reason == "stop" and token_ids[-1] in (sampling.stop_token_ids or ()):
        stop_reason = token_ids[-1]
        if not sampling.include_stop_str_in_output:
            token_ids.pop()
    logprobs = [_logprobs(entry) for entry in chunk.logprobs or ()]
    return Response(token_ids, logprobs, chunk.finish_reason, stop_reason, params)


def _logprobs(entry: TokenLogprob) -> dict[int, Logprob]:
    found = {token_id: Logprob(value, rank) for rank, (token_id, value) in enumerate(entry.top, 1)}
    return {entry.token_id: Logprob(entry.logprob), **found}


def _joined(chunks: list[TokenChunk]) -> TokenChunk:
    return TokenChunk(
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        chunks[-1].finish_reason,
        None,
        tuple(entry for chunk in chunks for entry in chunk.logprobs or ()) or None,
    )


def _params(job: Job, handoff: KvHandoff) -> Any:
    """What travels. The first token's log-probability goes in its own field, as Python objects."""
    state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
    bare = msgspec.msgpack.encode(msgspec.structs.replace(state, logprob=None))
    return DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=[handoff.first_token],
        first_gen_log_probs=[_logprobs(state.logprob)] if state.logprob is not None else None,
        ctx_request_id=job.result.request_id,
        opaque_state=msgspec.msgpack.encode(msgspec.structs.replace(handoff, engine_state=bare)),
        disagg_request_id=job.params.disagg_request_id,
    )


def _handoff(params: Any) -> KvHandoff:
    handoff = msgspec.msgpack.decode(params.opaque_state, type=KvHandoff)
    state = msgspec.msgpack.decode(handoff.engine_state, type=HandoffState)
    (first_token,) = params.first_gen_tokens
    logprob = None
    if params.first_gen_log_probs:
        (entries,) = params.first_gen_log_probs
        top = sorted(((i, e.logprob) for i, e in entries.items() if e.rank), key=lambda pair: -pair[1])
        logprob = TokenLogprob(first_token, entries[first_token].logprob, tuple(top))
    full = msgspec.msgpack.encode(msgspec.structs.replace(state, logprob=logprob))
    return msgspec.structs.replace(handoff, first_token=first_token, engine_state=full)
