"""The double's LLM: TensorRT-LLM's checks, then the engine's thread."""

import asyncio
import itertools
from typing import Any

from tensorrt_llm.executor.engine import Executor, Job
from tensorrt_llm.executor.result import RequestOutput
from tensorrt_llm.executor.translate import Request
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.params import SamplingParams, TorchLlmArgs, moves_kv_by_python
from tensorrt_llm.traps import TRAPS

_FIRST_GLOBAL_ID = 1 << 40


class LLM:
    """One engine in this process. The constructor blocks until the model is loaded. `salts` are the requests'
    cache salts, None without one; `traces` are their trace headers."""

    def __init__(  # noqa: PLR0917  as TensorRT-LLM has it
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name not in TorchLlmArgs.model_fields:
                raise ValueError(f"LLM got invalid argument: {name}")
        self.args: Any = TorchLlmArgs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        _check_transceiver(self.args)
        self._request_ids = itertools.count(1)
        self.salts: list[str | None] = []
        self.traces: list[Any] = []
        self._executor: Executor | None = Executor(self.args)

    def generate_async(  # noqa: PLR0917  as TensorRT-LLM has it
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        """Start a request; not a coroutine. Bad requests raise here, engine errors from the iteration."""
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        asyncio.get_running_loop()  # the result's queue is bound to it
        token_ids = inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs
        if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
            raise TypeError("the double takes token ids only")
        sampling = sampling_params if sampling_params is not None else SamplingParams()
        kind = (disaggregated_params and disaggregated_params.request_type) or "context_and_generation"
        self._check(token_ids, sampling, kind, disaggregated_params)
        self._check_salt(token_ids, cache_salt)
        self.salts.append(cache_salt)
        self.traces.append(trace_headers)
        result = RequestOutput(next(self._request_ids), self._executor.abort)
        result.disaggregated_params = disaggregated_params
        # With transferred KV, all of the prompt counts as cached.
        result.cached_tokens = len(token_ids) if kind == "generation_only" else 0
        request = Request(result.request_id, token_ids, sampling, streaming, kind, disaggregated_params)
        self._executor.submit(Job(request, result))
        return result

    def get_kv_cache_capacity(self) -> dict[str, int]:
        """The capacity of one rank's pool."""
        assert self._executor is not None
        blocks, size = self._executor.num_blocks, self.args.kv_cache_config.tokens_per_block
        return {"maxNumBlocks": blocks, "tokensPerBlock": size, "maxNumTokens": blocks * size}

    def shutdown(self) -> None:
        """End the engine; blocks."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _check_health(self) -> bool:
        return self._executor is not None and self._executor.check_health()

    def _check(self, token_ids: list[int], sampling: Any, kind: str, params: Any) -> None:
        if sampling.end_id is None and self.args.skip_tokenizer_init:
            raise ValueError("end_id must be given without a tokenizer")
        longest = self.args.max_num_tokens
        if kind != "generation_only" and not self.args.enable_chunked_prefill and len(token_ids) > longest:
            raise RequestError(f"The prompt length {len(token_ids)} exceeds max_num_tokens {longest}")
        if sampling.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided decoding needs guided_decoding_backend")
        if kind == "context_and_generation":
            return
        config = self.args.cache_transceiver_config
        if config is None or config.backend is None:
            raise ValueError("cache_transceiver_config with a backend is needed for disaggregated requests")
        if params.disagg_request_id is not None and params.disagg_request_id < _FIRST_GLOBAL_ID:
            raise ValueError("disagg_request_id below 2**40 is the engine's own")
        state = params.ctx_info_endpoint if moves_kv_by_python(config) else params.opaque_state
        if kind == "generation_only" and (params.ctx_request_id is None or state is None):
            raise ValueError("generation_only needs what context_only gave")

    def _check_salt(self, token_ids: list[int], cache_salt: str | None) -> None:
        """The requests with which attention DP fills idle ranks are all ones and unsalted: "an unsalted
        canary sharing that prefix crashes the rank" (Dynamo, health_check.py)."""
        reuses = self.args.enable_attention_dp and self.args.kv_cache_config.enable_block_reuse
        if reuses and cache_salt is None and token_ids[0] == 1:
            assert self._executor is not None
            self._executor.die("a rank died: a request shares its blocks with a dummy request")


def _check_transceiver(args: Any) -> None:
    """Configuration errors that surface only when the executor is created."""
    config = args.cache_transceiver_config
    if config is None or config.backend is None:
        return
    by_python = moves_kv_by_python(config)
    wrong_backend = by_python and config.backend not in ("NIXL", "DEFAULT")
    is_second = {True: True, "auto": TRAPS.prefers_python}.get(args.kv_cache_config.use_kv_cache_manager_v2)
    wrong_blocks = not by_python and is_second
    if wrong_backend or wrong_blocks:
        raise RuntimeError("Executor worker returned error")
