"""TensorRT-LLM for the library engine: one LLM in this process."""

import asyncio
import dataclasses
import inspect
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Set
from typing import Any

from baton import telemetry
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from baton.messages import NO_DRAFT, FinishReason, KvLayout, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.library.adapter import Call
from workers.engines.library.model_facts import ModelFacts
from workers.engines.library.settings import QUEUE_SIZE
from workers.engines.trtllm.library import Library, fatal_error, kv_capacity
from workers.engines.trtllm.sampling import sampling_params
from workers.engines.trtllm.settings import BACKEND, BUFFER, GUESSING, MANAGER_V2, MANAGERS, RUNTIME, TIMEOUT
from workers.engines.trtllm.watchdog import Leave, Patience, Watchdog
from workers.settings import Loaded

log = logging.getLogger(__name__)

_PATIENCE = Patience()
_DEFAULT_BATCH_SIZE = 2048  # if null
# How TensorRT-LLM marks guided decoding errors, and phrases in those that the form does not cause.
_GRAMMAR_ERROR = "Guided decoding error"
_NOT_OF_THE_FORM = ("internal error", "failed to accept", "still pending", "no precompiled grammar")
# Tensors, which Baton never requests, and which side is first: always prefill.
_STAYS = {"first_gen_logits", "schedule_style"}
_LOG_PROBS = "first_gen_log_probs"
_TIMES = (
    "arrival_time", "first_scheduled_time", "first_token_time", "kv_cache_transfer_start",
    "kv_cache_transfer_end",
)  # fmt: skip


class TrtllmAdapter:
    """TensorRT-LLM's context and generation as prefill and decode.

    * A pin cannot be released: KV that is not pulled stays until the KV timeout.
    * No request is aborted during its transfer, which would corrupt or hang the engine. A deadline below the
      KV timeout may come first: it ends the request, and the transfer finishes in the background. A request
      that outlives the KV timeout ends with HandoffFailed, since its prefill worker is gone.
    * A resumed answer continues exactly only if it is greedy: sampling is not positional.
    * Blocks are estimated from the open calls, reused ones once per call: querying TensorRT-LLM's own figures
      takes up to 2 s. Under attention DP each rank has its own batch and KV pool."""

    label = "TensorRT-LLM"

    def __init__(
        self,
        loaded: Loaded[dict[str, Any]],
        lib: Library,
        model: ModelFacts,
        *,
        leave: Leave = telemetry.leave,
        patience: Patience = _PATIENCE,
    ) -> None:
        """`leave` ends the process if the loop freezes or shutdown hangs."""
        self.llm: Any = None
        self.version = lib.version
        self.lib = lib
        self.model = model
        self.loaded = loaded
        self._leave, self._patience = leave, patience
        values = loaded.values
        self._options = _options(values)
        self._speculates = values.get("speculative_config") is not None
        self._draft = GUESSING.draft(loaded.given) if values.get(BACKEND) is not None else NO_DRAFT
        self._num_ranks = int(values["tensor_parallel_size"]) if values["enable_attention_dp"] else 1
        self._num_slots = int(values["max_batch_size"] or _DEFAULT_BATCH_SIZE) * self._num_ranks
        self._num_blocks = 0
        self._num_accepted_guesses = 0

    def load(self, on_failed_pull: Callable[[], None]) -> None:  # noqa: ARG002  failed pulls are errors
        """See `Adapter.load`. TensorRT-LLM starts MPI and sets signal handlers: in the main thread only."""
        self.llm = self.lib.llm(**self.loaded.settings)

    async def start(self) -> tuple[EngineInfo, float, int]:
        end = self.model.eos_token_id
        params = self.lib.sampling_params(
            max_tokens=2, end_id=end, pad_id=end, ignore_eos=True, detokenize=False
        )
        await self.llm.generate_async([0, 1, 2, 3], params, **self._options).aresult()
        self._num_blocks, num_tokens = kv_capacity(self.llm)
        is_reused = self.loaded.values["kv_cache_config.enable_block_reuse"]
        timeout_s = (self.loaded.values.get(TIMEOUT) or 0) / 1000
        return self._info(num_tokens), timeout_s, num_tokens if is_reused else 0

    def submit(self, call: Call) -> None:
        params = None
        if call.hands_over:
            # Equal ids, also of different prefill workers, would mix KV; those below 2^40 are reserved.
            handoff_id = 1 << 62 | secrets.randbits(62)
            params = self.lib.disaggregated_params(request_type="context_only", disagg_request_id=handoff_id)
        elif call.transfer is not None:
            params = generation_params(call.transfer, self.lib)
        sampling = sampling_params(call.request, self.lib, self.model, max_tokens=call.max_tokens)
        # Under attention DP each would be sent between ranks.
        sampling.return_perf_metrics = self._num_ranks == 1
        salt = {"cache_salt": call.cache_salt} if call.cache_salt else {}
        priority = self._priority(call.request.priority)
        try:
            call.result = self.llm.generate_async(
                call.request.token_ids,
                sampling,
                streaming=not call.hands_over,
                disaggregated_params=params,
                trace_headers=call.request.trace_headers,
                **{**self._options, **priority, **salt},
            )
        except (ValueError, NotImplementedError, self.lib.request_error) as error:
            kind = HandoffFailed if call.transfer is not None else InvalidRequest
            raise kind(f"TensorRT-LLM refuses the request: {error}") from error
        except Exception as error:  # a library may fail in any way
            raise self.failure(error, call) from error

    async def step(self, call: Call) -> TokenChunk:
        """See `Adapter.step`. The result is the same object at every step, its outputs are cumulative."""
        try:
            await call.result.__anext__()
        except AssertionError:  # TensorRT-LLM rejects a response that arrived; the request goes on
            call.has_answered = True
            call.is_over = call.hands_over
            raise
        except Exception:  # re-raised; nothing is left to abort
            call.is_over = True
            raise
        (output,) = call.result.outputs
        # A handed-over prompt: the transfer may start with its only response, and its end is not reported.
        call.is_over = output.finish_reason is not None or call.hands_over
        call.has_answered = True
        if call.hands_over and output.disaggregated_params is not None:
            call.kept = travelling(output.disaggregated_params)
            call.num_kept_blocks = self.num_blocks(len(call.request.token_ids))
        num_yielded = call.num_new_tokens
        reason = _finish_reason(output, call)
        if not num_yielded:
            _note_durations(getattr(output, "request_perf_metrics", None), call)
        token_ids = output.token_ids[num_yielded:]
        if reason == "stop":
            token_ids = _with_stop_token(token_ids, output, call)
        if reason is not None and self._speculates:
            self._num_accepted_guesses += max(0, len(output.token_ids) - call.result.decoding_iter)
        reported = (output.logprobs or [])[num_yielded : num_yielded + len(token_ids)]
        return call.chunk(token_ids, reason, call.result.cached_tokens, reported)

    async def abort(self, call: Call) -> bool:
        """An abort that crosses a handoff's response is refused: TensorRT-LLM keeps the KV until its timeout.
        Nothing is aborted in an engine that is dead or stopped."""
        if call.is_over or call.error is not None:
            return True
        if call.transfer is not None and not call.has_answered:
            return False  # it receives KV: its first response means that all has arrived
        call.result.abort()
        call.is_over = True
        return True

    def failure(self, error: Exception, call: Call) -> BatonError:
        """Undocumented errors, as a TypeError from another release's signature, are of no single request."""
        if not isinstance(error, (self.lib.request_error, AssertionError)):
            return WorkerLost(f"{type(error).__name__}: {error}")
        if (fatal := fatal_error(self.llm)) is not None:
            return WorkerLost(f"TensorRT-LLM recorded a fatal error: {fatal}")
        form, text = call.request.sampling.guided, str(error).strip()
        is_grammars = _GRAMMAR_ERROR in text and not any(words in text for words in _NOT_OF_THE_FORM)
        if form is not None and is_grammars:
            params = {message.param for message in form.last if message.grammar is not None}
            param = params.pop() if len(params) == 1 else None
            return InvalidRequest(f"the schema does not compile: {text}", param=param)
        if call.transfer is not None and not call.has_answered:
            return HandoffFailed(f"the KV did not arrive: {text}")
        return EngineFailure(f"TensorRT-LLM failed on this request: {text or type(error).__name__}")

    def figures(self, calls: Set[Call]) -> WorkerStats:
        lengths = [len(call.request.token_ids) + call.num_new_tokens for call in calls if call.kept is None]
        num_open = len(lengths)
        return WorkerStats(
            num_running=min(num_open, self._num_slots),
            num_waiting=max(0, num_open - self._num_slots),
            kv_blocks=self._num_blocks * self._num_ranks,
            kv_used_blocks=sum(map(self.num_blocks, lengths)),
            kv_pinned_blocks=sum(call.num_kept_blocks for call in calls),
            num_accepted_guesses=self._num_accepted_guesses,  # the library does not count wrong ones
        )

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // int(self.loaded.values["kv_cache_config.tokens_per_block"]))

    async def died(self) -> str:
        return await Watchdog(self.llm, leave=self._leave, patience=self._patience).broken()

    async def stop(self, *, is_broken: bool) -> None:
        llm, self.llm = self.llm, None
        if llm is None:
            return
        timer = threading.Timer(self._patience.shut_down_s, self._give_up)
        timer.daemon = True
        timer.start()
        if not is_broken:  # else it runs at exit, where it may wait forever for a dead executor
            await asyncio.to_thread(llm.shutdown)
            timer.cancel()

    def _give_up(self) -> None:
        log.error("the shutdown has taken %g s, exiting", self._patience.shut_down_s)
        self._leave(1)

    def _priority(self, priority: int) -> dict[str, float]:
        """From 0 to 1, higher is sooner, 0.5 by default. Early candidates of 1.3 have none."""
        if not priority:
            return {}
        parameters = inspect.signature(self.llm.generate_async).parameters
        if not any(name == "priority" or each.kind is each.VAR_KEYWORD for name, each in parameters.items()):
            raise InvalidRequest("this build of TensorRT-LLM does not support priority", param="priority")
        return {"priority": 0.5 - priority / 200}

    def _info(self, num_kv_tokens: int) -> EngineInfo:
        values, model = self.loaded.values, self.model
        is_paired = values.get(BACKEND) is not None
        context_length = int(values["max_seq_len"] or model.context_length)
        if 0 < num_kv_tokens < context_length:
            # TensorRT-LLM lowers its max_seq_len likewise, but reports it only in its log.
            log.warning("context of %d lowered to the KV cache's %d", context_length, num_kv_tokens)
            context_length = num_kv_tokens
        dtype, runtime = str(values["kv_cache_config.dtype"]).lower(), values.get(RUNTIME)
        # Neither runtimes nor managers mix.
        manager_v2 = values.get(MANAGER_V2)
        parts = (values.get(BACKEND), runtime, MANAGERS.get(runtime if manager_v2 == "auto" else manager_v2))
        kind = "-".join(str(part).lower() for part in parts if part)
        return EngineInfo(
            engine="trtllm",
            engine_version=self.version,
            context_length=context_length,
            kv_layout=KvLayout(
                dtype=model.kv_dtype if dtype == "auto" else dtype,
                tokens_per_block=int(values["kv_cache_config.tokens_per_block"]),
                num_layers=model.num_layers,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                tensor_parallel_size=None,  # it may differ between the two sides
                max_handoff_tokens=values.get(BUFFER),
                draft=self._draft,
            ),
            kv_transfer=f"{kind} (tp {values['tensor_parallel_size']})" if is_paired else "",
            max_batch_size=self._num_slots,
            max_queue_size=values[QUEUE_SIZE],
        )


def _note_durations(metrics: Any, call: Call) -> None:
    """From TensorRT-LLM's RequestPerfMetrics, if the request asked for them: times since an epoch of its own,
    0 if there is none. Only decode has those of a transfer."""
    if metrics is None:
        return
    arrived_s, began_s, first_s, pull_s, pulled_s = (
        getattr(metrics.timing_metrics, name).total_seconds() for name in _TIMES
    )
    if not first_s:
        return
    busy_s = first_s - max(began_s, pulled_s) + pulled_s - pull_s
    parts_s = (0.0, busy_s) if call.transfer is None else (busy_s, 0.0)
    call.spent.take(first_s - arrived_s - busy_s, *parts_s)


def _finish_reason(output: Any, call: Call) -> FinishReason | None:
    reason: str | None = output.finish_reason
    match reason:
        case None | "not_finished":
            return None
        case "length" if _ends_with_stop_token(output, call):  # the last allowed token was one
            return "stop"
        case "stop" | "length":
            return reason
        case "timeout":
            raise DeadlineExceeded
        case other:
            raise WorkerLost(f"TensorRT-LLM ended the request: {other}")


def _ends_with_stop_token(output: Any, call: Call) -> bool:
    """Whether a stop token ended the answer. TensorRT-LLM checks max_tokens before stop tokens other than
    `end_id`: prefill, whose max_tokens is 1, reports `length`."""
    sampling = call.request.sampling
    num_tokens = call.request.num_generated + len(output.token_ids)
    is_heeded = not sampling.ignore_eos and num_tokens > sampling.min_tokens
    return is_heeded and bool(output.token_ids) and output.token_ids[-1] in sampling.stop_token_ids


def _with_stop_token(token_ids: list[int], output: Any, call: Call) -> list[int]:
    """Add the stop token that ended the answer if this build omits it from the ids."""
    stops = call.request.sampling.stop_token_ids
    if not stops or (output.token_ids and output.token_ids[-1] in stops):
        return token_ids
    return [*token_ids, output.stop_reason if isinstance(output.stop_reason, int) else stops[0]]


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Options of every request: a common cache salt if prefixes are reused. Attention DP fills idle ranks
    with requests of ones (`[1, 1, ...]`), and a prompt that shares blocks with these would crash its rank;
    Dynamo salts its canary for this reason. Both sides of a handoff need the same salt."""
    is_paired = values.get(BACKEND) is not None
    needs_salt = values["kv_cache_config.enable_block_reuse"] and (values["enable_attention_dp"] or is_paired)
    return {"cache_salt": "baton"} if needs_salt else {}


def travelling(params: Any) -> dict[str, Any]:
    """The fields of DisaggregatedParams that are set (`opaque_state` is bytes), without TensorRT-LLM's
    classes: the other side's same release reads them."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    fields = {name: value for name, value in values.items() if value is not None and name not in _STAYS}
    if fields.get(_LOG_PROBS):
        fields[_LOG_PROBS] = [
            [(token_id, float(e.logprob), getattr(e, "rank", None)) for token_id, e in entries.items()]
            for entries in fields[_LOG_PROBS]
        ]
    return fields


def generation_params(fields: dict[str, Any], lib: Library) -> Any:
    """DisaggregatedParams for decode. Raises HandoffFailed."""
    try:
        log_probs = [
            {token_id: lib.logprob(logprob, rank) for token_id, logprob, rank in entries}
            for entries in fields.get(_LOG_PROBS) or ()
        ]
        decoded = fields | {"request_type": "generation_only", _LOG_PROBS: log_probs or None}
        return lib.disaggregated_params(**decoded)
    except (TypeError, ValueError) as error:
        raise HandoffFailed(f"TensorRT-LLM refuses the handoff: {error}") from error
