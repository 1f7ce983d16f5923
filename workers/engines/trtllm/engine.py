"""TensorRT-LLM as an engine: one LLM in this process, in one role."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from baton import telemetry
from baton.errors import HandoffFailed, InvalidRequest, Overloaded
from baton.messages import NO_TOKEN, GenerateRequest, KvHandoff, KvLayout, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.handoff import Handoffs
from workers.engines.model_facts import read_model_facts
from workers.engines.prefixes import HeldPrefixes
from workers.engines.token_requests import check_request, num_left
from workers.engines.trtllm.calls import Abort, Call, finish_reason
from workers.engines.trtllm.figures import Figures
from workers.engines.trtllm.handoff import generation_params, travelling
from workers.engines.trtllm.ids import HandoffIds
from workers.engines.trtllm.library import Completion, Library, kv_capacity
from workers.engines.trtllm.opening import open_llm, warm_up
from workers.engines.trtllm.requests import Requests
from workers.engines.trtllm.sampling import sampling_params
from workers.engines.trtllm.settings import BACKEND, BUFFER, MANAGER_V2, RUNTIME, TIMEOUT, manager
from workers.engines.trtllm.watchdog import Leave, Patience, Watchdog, leaving_after
from workers.settings import Loaded

log = logging.getLogger(__name__)

_HELD_BLOCK = 64  # tokens
_RETRY_AFTER_S = 1.0
_PATIENCE = Patience()


class TrtllmEngine:
    """TensorRT-LLM's context and generation as prefill and decode.

    Limitations of TensorRT-LLM:

    * It does not report when a handoff's KV has moved. `prefill` ends when it is closed, which the frontend
      does at decode's first chunk, or with HandoffFailed at the KV timeout.
    * A pin cannot be released: KV that is not pulled stays until the KV timeout. Closing `prefill` before
      its handoff aborts the request.
    * No request is aborted during its transfer. A deadline below the KV timeout may come first: it ends the
      request with DeadlineExceeded, and the transfer finishes in the background. A request that outlives the
      KV timeout ends with HandoffFailed, since its prefill worker is gone, and can be retried.
    * A resumed answer continues exactly only if it is greedy: sampling is not positional.
    * Block counts are estimated from the open requests; KV transfer metrics are not available.
    """

    def __init__(
        self,
        loaded: Loaded[dict[str, Any]],
        lib: Library,
        *,
        model_path: Path,
        worker_id: str,
        incarnation: str,
        leave: Leave = telemetry.leave,
        patience: Patience = _PATIENCE,
    ) -> None:
        """`leave` ends the process if the loop freezes, or loading or shutdown hangs."""
        values = loaded.values
        self._loaded = loaded
        self._lib = lib
        self._leave = leave
        self._patience = patience
        self._facts = read_model_facts(model_path)
        self._context_length = int(values["max_seq_len"] or self._facts.context_length)
        self._max_handoff_tokens: int | None = values.get(BUFFER)
        self._backend = values.get(BACKEND)
        self._kv_timeout_s = (values.get(TIMEOUT) or 0) / 1000
        self._ids = HandoffIds()
        self._options = _options(loaded.values)
        self._requests = Requests(lib, self._kv_timeout_s, self._options)
        self._figures = Figures(self._requests.open.calls, loaded.values)
        self._held = HeldPrefixes(_HELD_BLOCK, 0)
        self._handoffs = Handoffs("TensorRT-LLM", lib.version, worker_id=worker_id, incarnation=incarnation)
        self._watchdog: Watchdog | None = None

    async def start(self) -> EngineInfo:
        """Load and warm up; loading blocks the loop, see `open_llm`. Raises ValueError, OSError."""
        llm = open_llm(self._lib, self._loaded, self._patience.load_s, self._leave)
        self._watchdog = Watchdog(
            llm, self._requests.open.break_off, leave=self._leave, patience=self._patience
        )
        try:
            await warm_up(llm, self._lib, self._facts, self._options)
        except Exception as error:  # reported in one line to the operator
            self._requests.open.break_off(f"the first request failed: {error}")
            raise ValueError(f"TensorRT-LLM loaded, but its first request failed: {error}") from error
        self._requests.open.llm = llm
        self._figures.num_blocks, num_tokens = kv_capacity(llm)
        if self._loaded.values["kv_cache_config.enable_block_reuse"]:
            self._held.max_blocks = num_tokens // _HELD_BLOCK
        if 0 < num_tokens < self._context_length:
            # TensorRT-LLM lowers its max_seq_len likewise, but reports it only in its log.
            log.warning("context of %d lowered to the KV cache's %d", self._context_length, num_tokens)
            self._context_length = num_tokens
        return EngineInfo(
            name="trtllm",
            version=self._lib.version,
            context_length=self._context_length,
            kv_layout=self._kv_layout(),
            kv_transfer=self._kv_transfer(),
            kv_timeout_s=self._kv_timeout_s if self._backend is not None else None,
            max_batch_size=self._figures.num_slots,
            max_queue_size=self._figures.max_queue_size,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Yield the handoff, or the finished answer. See `Engine.prefill`, and above for its end."""
        self._check(request, hands_over=True)
        if num_left(request, self._context_length) == 1:  # nothing to hand over, so nothing is pinned
            async with aclosing(self._run(request, None)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        params = self._lib.disaggregated_params(
            request_type="context_only", disagg_request_id=self._ids.next()
        )
        sampling = sampling_params(request, self._lib, self._facts, max_tokens=1)
        async with self._requests.opened(request, sampling, params, Abort.UNTIL_ANSWERED) as call:
            output = await self._requests.step(call)
            self._figures.count_prompt(call)
            if finish_reason(output) == "stop" or call.ends_with_stop_token(output):
                yield self._chunk(call, output)
                return
            handoff = self._handoff(call, output)
            call.is_pinned = True
            yield handoff
            try:
                await call.stay_pinned(handoff.ttl_s)
            except HandoffFailed:
                self._figures.num_handoffs_expired += 1
                raise

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer's chunks. See `Engine.decode`."""
        self._check(request, hands_over=False)
        async with aclosing(self._run(request, request.handoff)) as chunks:
            async for chunk in chunks:
                yield chunk

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        """See `Engine.num_lacking_tokens`: an estimate, since TensorRT-LLM's cache cannot be asked."""
        return len(request.token_ids) - self._held.num_held(request.token_ids, request.cache_salt)

    def stats(self) -> WorkerStats:
        """Live metrics; counters start with the process."""
        return self._figures.stats()

    async def failed(self) -> str:
        """Wait until TensorRT-LLM breaks: it records a fatal error, or raises one that no request caused."""
        await self._requests.open.broke.wait()
        return self._requests.open.reason

    async def stop(self) -> None:
        """End every call with WorkerLost and shut TensorRT-LLM down. Idempotent."""
        llm = await self._requests.stop()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._requests.open.broke.is_set():
            # Its own shutdown, which also runs at exit, may wait forever for a dead executor.
            timer = threading.Timer(self._patience.shut_down_s, self._leave, (1,))
            timer.daemon = True
            timer.start()
        elif llm is not None:
            with leaving_after(self._patience.shut_down_s, self._leave, "shutting down"):
                await asyncio.to_thread(llm.shutdown)

    async def _run(
        self, request: GenerateRequest, handoff: KvHandoff | None
    ) -> AsyncGenerator[TokenChunk, None]:
        params, num_cached, abort = None, None, Abort.ANY_TIME
        if handoff is not None:
            envelope = self._handoffs.open(handoff, len(request.token_ids))
            params, num_cached = generation_params(envelope.params, self._lib), envelope.num_cached_tokens
            abort = Abort.ONCE_ANSWERED
        max_tokens = num_left(request, self._context_length)
        sampling = sampling_params(request, self._lib, self._facts, max_tokens=max_tokens)
        async with self._requests.opened(request, sampling, params, abort) as call:
            call.num_cached_tokens = num_cached
            chunk = self._chunk(call, await self._requests.step(call))
            generated: list[int] = []
            held = self._held.hold(request.token_ids, request.cache_salt)
            if handoff is None:
                self._figures.count_prompt(call)
            else:
                self._figures.num_handoffs += 1
            while True:
                generated += chunk.token_ids
                if chunk.finish_reason:
                    self._held.extend(held, generated[:-1])
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
                chunk = self._chunk(call, await self._requests.step(call))

    def _chunk(self, call: Call, output: Completion) -> TokenChunk:
        chunk = call.chunk(output)
        self._figures.num_generated_tokens += len(chunk.token_ids)
        return chunk

    def _check(self, request: GenerateRequest, *, hands_over: bool) -> None:
        self._requests.open.check_running()
        check_request(request, self._facts, self._context_length)
        if hands_over or request.handoff is not None:
            self._check_handoff(request)
        if self._figures.is_full:
            raise Overloaded("the worker's queue is full; try again later", retry_after_s=_RETRY_AFTER_S)

    def _check_handoff(self, request: GenerateRequest) -> None:
        if self._backend is None:
            raise HandoffFailed(f"this worker does not transfer KV: set {BACKEND}")
        longest, num_tokens = self._max_handoff_tokens, len(request.token_ids)
        if longest is not None and num_tokens > longest:  # it would stall both sides
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens; {BUFFER} ({longest}) "
                "is the most that prefill can hand over"
            )

    def _handoff(self, call: Call, output: Completion) -> KvHandoff:
        if output.disaggregated_params is None:
            raise HandoffFailed("TensorRT-LLM returned no DisaggregatedParams for an unfinished answer")
        self._figures.num_handoffs += 1
        left_s = call.deadline - asyncio.get_running_loop().time()
        return self._handoffs.write(
            call.request,
            travelling(output.disaggregated_params),
            first_token=output.token_ids[0] if output.token_ids else NO_TOKEN,  # decode yields it, too
            num_cached_tokens=call.result.cached_tokens,
            ttl_s=min(self._kv_timeout_s, left_s),
        )

    def _kv_layout(self) -> KvLayout:
        values, facts = self._loaded.values, self._facts
        dtype = str(values["kv_cache_config.dtype"]).lower()
        return KvLayout(
            dtype=facts.kv_dtype if dtype == "auto" else dtype,
            tokens_per_block=int(str(values["kv_cache_config.tokens_per_block"])),
            num_layers=facts.num_layers,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            tensor_parallel_size=None,  # it may differ between the two sides
            max_handoff_tokens=self._max_handoff_tokens,
        )

    def _kv_transfer(self) -> str:
        if self._backend is None:
            return ""
        values = self._loaded.values
        runtime = values.get(RUNTIME)  # neither runtimes nor managers mix
        parts = (self._backend, runtime, manager(runtime, values.get(MANAGER_V2)))
        kind = "-".join(str(part).lower() for part in parts if part)
        return f"{kind} (tp {values['tensor_parallel_size']})"


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of every request: a common cache salt if prefixes are reused. Attention DP fills idle ranks
    with requests of ones (`[1, 1, ...]`), and a prompt that shares blocks with these would crash its rank;
    Dynamo salts its canary for this reason. Both sides of a handoff need the same salt.
    """
    is_paired = values.get(BACKEND) is not None
    needs_salt = values["kv_cache_config.enable_block_reuse"] and (values["enable_attention_dp"] or is_paired)
    return {"cache_salt": "baton"} if needs_salt else {}
