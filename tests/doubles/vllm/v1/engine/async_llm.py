"""The double's AsyncLLM: vLLM's checks, then the engine core."""

import asyncio
import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from baton.messages import GenerateRequest, Sampling, TokenLogprob
from vllm.outputs import CompletionOutput, Logprob, RequestOutput, SchedulerStats
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.core import Core, Job, Output
from vllm.v1.engine.exceptions import EngineDeadError

_FOREVER_S = 1e6
_SAME = ("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "logprobs", "prompt_logprobs")
_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


@dataclasses.dataclass
class Collector:
    """The outputs of one request since its caller last looked."""

    request_id: str
    kind: Any
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    output: RequestOutput | None = None
    error: Exception | None = None
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def put(self, step: Output, wants_logprobs: bool) -> None:
        """Add a step: its new tokens, or all so far unless DELTA was requested."""
        new_ids, new_logprobs = list(step.chunk.token_ids), [_entry(e) for e in step.chunk.logprobs or ()]
        self.token_ids += new_ids
        self.logprobs += new_logprobs
        if self.kind is not RequestOutputKind.DELTA:
            new_ids, new_logprobs = list(self.token_ids), list(self.logprobs)
        if self.kind is RequestOutputKind.FINAL_ONLY and step.finish_reason is None:
            return
        logprobs = new_logprobs if wants_logprobs else None
        completion = CompletionOutput(0, "", new_ids, logprobs, step.finish_reason)
        finished = step.finish_reason is not None
        output = RequestOutput(self.request_id, [completion], finished, step.num_cached_tokens, step.transfer)
        output.metrics = step.stats
        if step.chunk.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *map(_entry, step.chunk.prompt_logprobs)]
        if self.output is not None and self.kind is RequestOutputKind.DELTA:
            self.output.add(output)
        else:
            self.output = output
        self.ready.set()

    async def get(self) -> RequestOutput:
        """Wait for the next output. Raises the error that ended the engine."""
        await self.ready.wait()
        self.ready.clear()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        output, self.output = self.output, None
        return output


class AsyncLLM:
    """One engine. Its core has its own thread; outputs arrive in the loop that created this. `salts` are the
    requests' cache salts, None without one; `traces` are their trace headers."""

    def __init__(self, vllm_config: Any, stat_loggers: Iterable[Callable[[Any, int], Any]] | None) -> None:
        self.vllm_config = vllm_config
        self._collectors: dict[str, tuple[Collector, bool]] = {}
        self._loggers = [make(vllm_config, 0) for make in stat_loggers or ()]
        self._loop = asyncio.get_running_loop()
        self._is_dead = False
        self.salts: list[str | None] = []
        self.traces: list[Any] = []
        self._core: Core | None = Core(
            vllm_config,
            lambda *step: self._from_core(self._take, *step),
            lambda: self._from_core(self._take_death),
        )
        for logger in self._loggers:
            logger.log_engine_initialized()

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,  # noqa: ARG003  as vLLM has it
        usage_context: Any = None,  # noqa: ARG003  as vLLM has it
        stat_loggers: list[Any] | None = None,
    ) -> "AsyncLLM":
        """Blocks until the model is loaded."""
        return cls(engine_args.create_engine_config(), stat_loggers)

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Any = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Starts with the first iteration; closing it aborts the request."""
        await self.check_health()
        assert self._core is not None
        token_ids = prompt["prompt_token_ids"]
        self._check(token_ids, sampling_params)
        self.salts.append(prompt.get("cache_salt"))
        self.traces.append(trace_headers)
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise ValueError(f"priority {priority}, but the scheduling policy is fcfs")
        own_id = f"{request_id}-{secrets.token_hex(4)}"
        transfer = (sampling_params.extra_args or {}).get("kv_transfer_params") or {}
        collector = Collector(request_id, sampling_params.output_kind)
        self._collectors[own_id] = (collector, sampling_params.logprobs is not None)
        self._core.add(
            Job(own_id, self._request(own_id, token_ids, prompt.get("cache_salt"), sampling_params), transfer)
        )
        finished = False
        try:
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(own_id, internal=True)
            raise
        finally:
            self._collectors.pop(own_id, None)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """Ask the core to end a request, without waiting."""
        assert internal, "the double knows its own request ids only"
        if self._core is not None:
            self._core.abort(request_id)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109  as vLLM has it
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> list[Any]:
        """Call a method of each GPU worker, of which there is one."""
        await self.check_health()
        assert self._core is not None
        return [await asyncio.wait_for(asyncio.wrap_future(self._core.call(method, args)), timeout)]

    @property
    def errored(self) -> bool:
        """Whether its core or what reads it has ended."""
        return self._is_dead or self._core is None

    async def check_health(self) -> None:
        """Raises EngineDeadError."""
        if self.errored:
            raise EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core; blocks."""
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()

    def _check(self, token_ids: list[int], params: Any) -> None:
        model, args = self.vllm_config.model_config, self.vllm_config.args
        if not token_ids:
            raise ValueError("The decoder prompt cannot be empty")
        if len(token_ids) >= model.max_model_len:
            raise ValueError(f"The decoder prompt (length {len(token_ids)}) is longer than the model's")
        for token_id in (*token_ids, *(params.logit_bias or ())):
            if not 0 <= token_id < model.facts.vocab_size:
                raise ValueError(f"Token id {token_id} is out of vocabulary")
        if (params.logprobs or 0) > args.max_logprobs:
            raise ValueError(f"Requested sample logprobs of {params.logprobs}, max is {args.max_logprobs}")
        if params.structured_outputs is not None:
            if args.skip_tokenizer_init:
                raise ValueError("Structured outputs requires a tokenizer")
            json.loads(params.structured_outputs.structural_tag)  # not enforced here

    def _request(self, own_id: str, token_ids: list[int], salt: str | None, params: Any) -> GenerateRequest:
        eos = () if params.ignore_eos else (self.vllm_config.model_config.facts.eos_token_id,)
        sampling = Sampling(
            **{name: getattr(params, name) for name in (*_SAME, *_PENALTIES)},
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            top_k=max(0, params.top_k),
            logit_bias=params.logit_bias or {},
            stop_token_ids=tuple(i for i in (*params.stop_token_ids, *eos) if i >= 0),
        )
        # The second runner draws by a token's place in the whole sequence (vllm/v1/worker/gpu/sample).
        is_placed = self.vllm_config.use_v2_model_runner and params.prompt_logprobs is None
        before = len(token_ids) - 1 if is_placed else 0
        sampling = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens + before, min_tokens=sampling.min_tokens + before
        )
        return GenerateRequest(
            request_id=own_id,
            model="double",
            token_ids=token_ids,
            num_generated=before,
            sampling=sampling,
            deadline_s=_FOREVER_S,
            cache_salt=salt or "",
        )

    def _from_core(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the caller's loop has closed

    def _take(self, outputs: list[Output], stats: SchedulerStats) -> None:
        for output in outputs:
            if output.request_id in self._collectors:
                collector, wants_logprobs = self._collectors[output.request_id]
                collector.put(output, wants_logprobs)
        for logger in self._loggers:
            logger.record(scheduler_stats=stats, iteration_stats=None, mm_cache_stats=None, engine_idx=0)

    def _take_death(self) -> None:
        self._is_dead = True
        for collector, _ in self._collectors.values():
            collector.error = EngineDeadError()
            collector.ready.set()


def _entry(given: TokenLogprob) -> dict[int, Logprob]:
    found = {token_id: Logprob(value, rank) for rank, (token_id, value) in enumerate(given.top, 1)}
    return {given.token_id: Logprob(given.logprob), **found}
