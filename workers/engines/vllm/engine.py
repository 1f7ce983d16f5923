"""vLLM as an engine: one AsyncLLM in one role, with its core in separate processes."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from baton.errors import HandoffFailed, Overloaded
from baton.messages import GenerateRequest, KvHandoff, KvLayout, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.handoff import Handoffs
from workers.engines.loading import dying_at_once
from workers.engines.model_facts import read_model_facts
from workers.engines.prefixes import HeldPrefixes
from workers.engines.queue_size import QUEUE_SIZE
from workers.engines.token_requests import check_request, num_left
from workers.engines.vllm.calls import Call, Calls
from workers.engines.vllm.chunker import Chunker
from workers.engines.vllm.figures import Figures
from workers.engines.vllm.handoff import KEEP, NUM_TOKENS, num_blocks
from workers.engines.vllm.kernels import WARM_UP_LOGPROBS, warm_up_lengths
from workers.engines.vllm.library import SECOND_RUNNER, Library, Result
from workers.engines.vllm.pins import Releases
from workers.engines.vllm.sampling import is_continued_exactly, sampling_params
from workers.engines.vllm.settings import LEASE, TRANSFER
from workers.settings import Loaded

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_WARM_UP_S = 600.0
_HELD_BLOCK = 64  # tokens
_OVERTAKEN_TOKENS_PER_S = 2000.0
_PRIORITY_MS = 10**12  # more than any time


class VllmEngine:
    """AsyncLLM as prefill and decode; `PeerConnector` moves the KV.

    Limitations of vLLM:

    * The sampling of vLLM's first runner has no positions. Where that shows (`is_continued_exactly`),
      decode samples the first token again from the transferred KV; prefill's only shows whether the answer
      ends with it.
    * vLLM does not report to this process when a handoff's KV has moved. `prefill` ends when it is closed,
      which the frontend does at decode's first chunk, or with HandoffFailed at the end of the lease.
    * A resumed answer continues exactly if it is greedy, or the second runner samples it. Baton asks for
      that runner if Triton works.
    """

    def __init__(
        self,
        loaded: Loaded[dict[str, Any]],
        lib: Library,
        *,
        model_path: Path,
        worker_id: str,
        incarnation: str,
    ) -> None:
        """Raises OSError, ValueError if the model folder does not describe the model."""
        self._loaded = loaded
        self._lib = lib
        self._max_queue_size: int = loaded.values[QUEUE_SIZE]
        self._facts = read_model_facts(model_path)
        self._transfers = loaded.values.get(f"{TRANSFER}.kv_connector") is not None
        self._lease_s = float((loaded.values.get(LEASE) or {}).get("kv_lease_duration", 0))
        self._context_length = 0
        self._max_open = 0
        self._has_priorities = False
        self.is_positional = False
        self._held = HeldPrefixes(_HELD_BLOCK, 0)
        self._calls = Calls(lib)
        self._handoffs = Handoffs("vLLM", lib.version, worker_id=worker_id, incarnation=incarnation)
        self._figures = Figures(self._calls.fail_pulls)
        self._releases = Releases()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Load and warm up; loading blocks the loop. Raises ValueError, OSError."""
        log.info("loading model=%s with vLLM %s", self._loaded.settings["model"], self._lib.version)
        llm = self._load()
        self._calls.open.llm = llm
        self._watching = asyncio.create_task(self._calls.watch(), name="vllm-health")
        config = llm.vllm_config
        self._context_length = config.model_config.max_model_len
        self._max_open = config.scheduler_config.max_num_seqs + self._max_queue_size
        self._has_priorities = config.scheduler_config.policy == "priority"
        self.is_positional = bool(getattr(config, "use_v2_model_runner", False))
        self._figures.num_blocks = config.cache_config.num_gpu_blocks or 0
        await self._warm_up(llm)
        if config.cache_config.enable_prefix_caching:
            num_tokens = self._figures.num_blocks * config.cache_config.block_size
            self._held.max_blocks = num_tokens // _HELD_BLOCK // 2  # sliding-window layers take blocks, too
        return EngineInfo(
            name="vllm",
            version=self._lib.version,
            context_length=self._context_length,
            kv_layout=self._kv_layout(config),
            # NIXL refuses a peer with a different model path.
            kv_transfer=f"nixl:{quote(config.model_config.model)}" if self._transfers else "",
            max_batch_size=config.scheduler_config.max_num_seqs,
            max_queue_size=self._max_queue_size,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        """Yield the handoff, or the finished answer. See `Engine.prefill`, and above for its end."""
        self._check(request)
        if not self._transfers:
            raise HandoffFailed("this worker does not transfer KV: it runs with --disaggregation-mode agg")
        if num_left(request, self._context_length) == 1:  # nothing to hand over, so nothing is pinned
            async with aclosing(self._run(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        sampling = self._sampling(request, max_tokens=1, transfer=dict(KEEP))
        async with self._calls.opened(request, sampling, self._place(request)) as call:
            try:
                result = await self._calls.step(call)
                self._count_prompt(request, result)
                self._held.hold(request.token_ids, call.cache_salt)
                chunk = Chunker(request).chunk(result)
                self._figures.pinned[call.request_id] = num_blocks(result.kv_transfer_params or {})
                if chunk.finish_reason == "stop":
                    self._figures.num_generated_tokens += 1
                    yield chunk
                    return
                yield self._handoff(call, result, chunk)
                await self._stay_pinned(call)
            finally:
                self._unpin(call)

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer's chunks. See `Engine.decode`."""
        self._check(request)
        async with aclosing(self._run(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        """See `Engine.num_lacking_tokens`: an estimate, since vLLM's cache cannot be asked."""
        return len(request.token_ids) - self._held.num_held(request.token_ids, self._calls.salt(request))

    def stats(self) -> WorkerStats:
        """Live metrics; counters start with the process."""
        return self._figures.stats()

    async def failed(self) -> str:
        """Wait until vLLM's engine core is dead."""
        await self._calls.open.broke.wait()
        return self._calls.open.reason

    async def stop(self) -> None:
        """End every call with WorkerLost and shut vLLM down. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
        llm = self._calls.open.stop()
        if llm is not None:
            await self._releases.stop()
            llm.shutdown()

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        transfer, num_cached = None, None
        if request.handoff is not None:
            if not self._transfers:
                raise HandoffFailed("this worker does not accept KV: it runs with --disaggregation-mode agg")
            envelope = self._handoffs.open(request.handoff, len(request.token_ids))
            transfer = envelope.params | {NUM_TOKENS: request.handoff.num_prompt_tokens}
            num_cached = envelope.num_cached_tokens
        max_tokens = num_left(request, self._context_length)
        sampling = self._sampling(request, max_tokens=max_tokens, transfer=transfer)
        chunker = Chunker(request, num_cached)
        generated: list[int] = []
        async with self._calls.opened(request, sampling, self._place(request)) as call:
            result = await self._calls.step(call)
            self._count_prompt(request, result)
            held = self._held.hold(request.token_ids, call.cache_salt)
            chunk = chunker.chunk(result)
            while True:
                self._figures.num_generated_tokens += len(chunk.token_ids)
                generated += chunk.token_ids
                if chunk.finish_reason:
                    self._held.extend(held, generated[:-1])
                if chunk.token_ids or chunk.finish_reason:
                    yield chunk
                if chunk.finish_reason:
                    return
                chunk = chunker.chunk(await self._calls.step(call))

    def _sampling(self, request: GenerateRequest, *, max_tokens: int, transfer: dict[str, Any] | None) -> Any:
        return sampling_params(
            request,
            self._lib,
            self._facts,
            max_tokens=max_tokens,
            transfer=transfer,
            is_positional=self.is_positional,
        )

    def _place(self, request: GenerateRequest) -> int:
        """vLLM's priority, lower is sooner. Among equals, each waits as if it had come later, by what it has
        to compute: a short turn overtakes long prompts, which never wait longer than that for later ones.
        """
        if not self._has_priorities:
            return request.priority
        num_tokens = self.num_lacking_tokens(request) if request.handoff is None else 0
        due_s = asyncio.get_running_loop().time() + num_tokens / _OVERTAKEN_TOKENS_PER_S
        return request.priority * _PRIORITY_MS + round(due_s * 1000)

    def _count_prompt(self, request: GenerateRequest, result: Result) -> None:
        if request.handoff is None:
            num_cached = result.num_cached_tokens or 0
            self._figures.num_prompt_tokens += len(request.token_ids) - num_cached
            self._figures.num_cached_tokens += num_cached
        else:
            self._figures.num_handoffs += 1

    def _check(self, request: GenerateRequest) -> None:
        self._calls.open.check_running()
        check_request(request, self._facts, self._context_length)
        if len(self._calls.open.calls) - len(self._figures.pinned) >= self._max_open:
            raise Overloaded("the worker's queue is full; try again later", retry_after_s=_RETRY_AFTER_S)

    def _handoff(self, call: Call, result: Result, first: TokenChunk) -> KvHandoff:
        if not result.kv_transfer_params:
            raise HandoffFailed("vLLM returned no kv_transfer_params for an unfinished answer")
        self._figures.num_handoffs += 1
        goes_on = is_continued_exactly(call.request.sampling, is_positional=self.is_positional)
        return self._handoffs.write(
            call.request,
            result.kv_transfer_params,
            first_token=result.outputs[0].token_ids[0],
            num_cached_tokens=result.num_cached_tokens or 0,
            ttl_s=self._ttl_s(call),
            first_chunk=TokenChunk(first.token_ids, None, first.usage, first.logprobs) if goes_on else None,
        )

    async def _stay_pinned(self, call: Call) -> None:
        """Wait to be closed. Raises HandoffFailed at the end of the lease, or the call's error."""
        try:
            await call.ending.pinned(self._ttl_s(call))
        except HandoffFailed:
            self._figures.num_handoffs_expired += 1
            raise

    def _ttl_s(self, call: Call) -> float:
        return min(self._lease_s, max(0.0, call.deadline - asyncio.get_running_loop().time()))

    def _unpin(self, call: Call) -> None:
        """Release the KV; vLLM may keep it even if its output never arrived here."""
        self._figures.pinned.pop(call.request_id, None)
        if self._calls.open.llm is not None and not self._calls.open.broke.is_set():
            self._releases.add(self._calls.open.llm, call.request_id)

    def _load(self) -> Any:
        """The AsyncLLM. Raises ValueError with one line for the user."""
        with dying_at_once():
            try:
                args = self._lib.engine_args(**self._loaded.settings)
                return self._lib.llm.from_engine_args(args, stat_loggers=[lambda *_: self._figures])
            except Exception as error:  # reported in one line to the operator
                log.exception("vLLM did not start")
                hint = f"; or set {SECOND_RUNNER}=0" if "Model Runner V2" in str(error) else ""
                raise ValueError(f"vLLM did not start: {type(error).__name__}: {error}{hint}") from error

    async def _warm_up(self, llm: Any) -> None:
        """Run the step sizes that compile new kernel variants, so that no client waits for them."""
        longest = min(llm.vllm_config.scheduler_config.max_num_batched_tokens, self._context_length - 2)
        runs = [(length, None) for length in warm_up_lengths(longest)] + [(1, n) for n in WARM_UP_LOGPROBS]
        try:
            async with asyncio.timeout(_WARM_UP_S):
                for number, (length, logprobs) in enumerate(runs):
                    params = self._lib.sampling_params(
                        max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
                    )
                    prompt = {"prompt_token_ids": [number] * length}  # no common prefix to cache
                    async for _ in llm.generate(prompt, params, f"warm-up-{number}"):
                        pass
        except Exception as error:  # reported in one line, as above
            raise ValueError(f"vLLM loaded, but its warm-up failed: {error!r}") from error

    def _kv_layout(self, config: Any) -> KvLayout:
        dtype = str(config.cache_config.cache_dtype)
        return KvLayout(
            dtype=str(config.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
            tokens_per_block=config.cache_config.block_size,
            num_layers=self._facts.num_layers,
            num_kv_heads=self._facts.num_kv_heads,
            head_dim=self._facts.head_dim,
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        )
