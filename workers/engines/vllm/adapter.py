"""vLLM for the library engine: one AsyncLLM, with its core in separate processes."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Set
from typing import Any
from urllib.parse import quote

from msgspec.structs import replace

from baton.errors import BatonError, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from baton.messages import NO_DRAFT, FinishReason, KvLayout, TokenChunk, WorkerStats
from workers.engine import EngineInfo
from workers.engines.library.adapter import Call, token_logprobs
from workers.engines.library.model_facts import ModelFacts
from workers.engines.library.release import release_of
from workers.engines.library.settings import QUEUE_SIZE
from workers.engines.vllm.library import Library
from workers.engines.vllm.patches import CONNECTOR, DRAWS, NUM_TOKENS, RELEASE, is_on
from workers.engines.vllm.patches.kernels import WARM_UP_LOGPROBS, warm_up_lengths
from workers.engines.vllm.sampling import is_continued_exactly, sampling_params
from workers.engines.vllm.settings import GUESSING, LEASE, SECOND_RUNNER, TRANSFER
from workers.settings import Loaded, SettingsError

log = logging.getLogger(__name__)

# With others, the KV of a draft model was not handed over on a GPU.
DRAFTS_TRIED = ((0, 26),)
_NOT_TRIED = (
    "prefill and decode workers hand over a draft model's KV with vLLM 0.26 only; leave it out, or run the "
    "worker with --disaggregation-mode agg"
)
_POLL_S = 0.5
_MAX_PULLS = 256
_OVERTAKEN_TOKENS_PER_S = 2000.0
_PRIORITY_MS = 10**12  # more than any time
_RELEASE_S = 30.0
_RELEASE_AGAIN_S = 0.05
_MAX_RELEASES = 40

# vLLM's kv_transfer_params of a prompt whose KV is kept for another worker.
_REMOTE = "remote_engine_id", "remote_block_ids", "remote_host", "remote_port"
KEEP: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(_REMOTE)


class VllmAdapter:
    """AsyncLLM as prefill and decode; `PeerConnector` moves the KV.

    * The sampling of vLLM's first runner has no positions. Where that shows (`is_continued_exactly`),
      decode samples the first token again from the transferred KV; prefill's only shows whether the answer
      ends with it. A resumed answer continues exactly if it is greedy, or the second runner samples it.
    * After a failed pull, for a hybrid model such as gpt-oss, vLLM decodes from whatever is in the blocks."""

    label = "vLLM"

    def __init__(self, loaded: Loaded[dict[str, Any]], lib: Library, model: ModelFacts) -> None:
        self.llm: Any = None
        self.version = lib.version
        self.lib = lib
        self.model = model
        self.is_positional = False
        self.loaded = loaded
        self._transfers = loaded.values.get(f"{TRANSFER}.kv_connector") is not None
        self._draft = GUESSING.draft(loaded.given) if self._transfers else NO_DRAFT
        if self._draft != NO_DRAFT and release_of(lib.version) not in DRAFTS_TRIED:
            raise SettingsError(f"vLLM {lib.version}: {GUESSING.names[0]}: {_NOT_TRIED}")
        self._lease_s = float((loaded.values.get(LEASE) or {}).get("kv_lease_duration", 0))
        self._figures = _SchedulerFigures()
        self._releases = _Releases()

    def load(self, on_failed_pull: Callable[[], None]) -> None:
        self._figures.on_failed_pull = on_failed_pull
        args = self.lib.engine_args(**self.loaded.settings)
        try:
            self.llm = self.lib.llm.from_engine_args(args, stat_loggers=[lambda *_: self._figures])
        except ValueError as error:
            if "Model Runner V2" in str(error):
                raise ValueError(f"{error}; or set {SECOND_RUNNER}=0") from error
            raise

    async def start(self) -> tuple[EngineInfo, float, int]:
        config = self.llm.vllm_config
        self.is_positional = bool(getattr(config, "use_v2_model_runner", False)) and (
            getattr(config, "speculative_config", None) is None or is_on(DRAWS, self.version)
        )
        cache = config.cache_config
        self._figures.num_blocks = cache.num_gpu_blocks or 0
        await self._warm_up()
        # Half of them: sliding-window layers take blocks, too.
        num_reused = self._figures.num_blocks * cache.block_size // 2 if cache.enable_prefix_caching else 0
        return self._info(config), self._lease_s, num_reused

    def submit(self, call: Call) -> None:
        transfer = None
        if call.hands_over:
            transfer = dict(KEEP)
        elif call.transfer is not None and call.request.handoff is not None:
            transfer = call.transfer | {NUM_TOKENS: call.request.handoff.num_prompt_tokens}
        sampling = sampling_params(
            call.request,
            self.lib,
            self.model,
            max_tokens=call.max_tokens,
            transfer=transfer,
            is_positional=self.is_positional,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": call.request.token_ids}
        if call.cache_salt:
            prompt["cache_salt"] = call.cache_salt
        trace, place = call.request.trace_headers, self._place(call)
        call.result = self.llm.generate(prompt, sampling, call.id, trace_headers=trace, priority=place)

    async def step(self, call: Call) -> TokenChunk:
        """See `Adapter.step`. A result has the tokens since the last one; the first has `prompt_logprobs`."""
        result = await anext(call.result)
        (output,) = result.outputs
        reason = _finish_reason(output.finish_reason, call)
        if not call.num_new_tokens:
            self._note_durations(call, getattr(result, "metrics", None))
        if call.hands_over and result.kv_transfer_params:
            self._note_kept(call, result.kv_transfer_params)
        if (num_top := call.request.sampling.prompt_logprobs) is not None and result.prompt_logprobs:
            reported = [entries or {} for entries in result.prompt_logprobs[1:]]  # the first one is None
            call.prompt_logprobs = token_logprobs(call.request.token_ids[1:], reported, num_top)
        return call.chunk(output.token_ids, reason, result.num_cached_tokens or 0, output.logprobs)

    def _note_durations(self, call: Call, stats: Any) -> None:
        """From vLLM's RequestStateStats, None if its statistics are off. A request whose KV moves waits."""
        if stats is None or not (stats.queued_ts and stats.scheduled_ts and stats.first_token_ts):
            return
        waited_s = stats.scheduled_ts - stats.queued_ts
        computed_s = stats.first_token_ts - stats.scheduled_ts
        if call.transfer is None:
            call.spent.take(waited_s, 0.0, computed_s)
        else:
            moved_s = min(waited_s, self._figures.longest_pull_s(call.spent.began_s))
            call.spent.take(waited_s - moved_s, moved_s + computed_s, 0.0)

    def _note_kept(self, call: Call, transfer: dict[str, Any]) -> None:
        groups = transfer.get("remote_block_ids") or ()  # a list per group of layers
        call.kept = transfer
        call.num_kept_blocks = sum(len(g) if isinstance(g, (list, tuple)) else 1 for g in groups)
        is_exact = is_continued_exactly(call.request.sampling, is_positional=self.is_positional)
        call.is_continued = is_exact and is_on(CONNECTOR, self.version)

    async def abort(self, call: Call) -> bool:
        """vLLM aborts what is no longer read. It may keep KV even if its output never arrived."""
        if call.hands_over and not isinstance(call.error, WorkerLost) and is_on(RELEASE, self.version):
            self._releases.add(self.llm, call.id)
        await call.result.aclose()
        return True

    def failure(self, error: Exception, call: Call) -> BatonError:  # noqa: ARG002  of any request
        if isinstance(error, self.lib.dead) or self.llm.errored:  # which ends every request, by any error
            return WorkerLost(f"vLLM's engine core died: {error!r}")
        if isinstance(error, ValueError):
            return InvalidRequest(f"vLLM refuses the request: {error}")
        return EngineFailure(f"vLLM failed on this request: {error.__cause__ or error!r}")

    def figures(self, calls: Set[Call]) -> WorkerStats:
        """See `Adapter.figures`: those of the scheduler's last step, in which kept blocks are used ones."""
        num_kept = sum(call.num_kept_blocks for call in calls)
        last, num_blocks = self._figures.last, self._figures.num_blocks
        num_used = max(0, last.kv_used_blocks - num_kept)
        return replace(last, kv_blocks=num_blocks, kv_used_blocks=num_used, kv_pinned_blocks=num_kept)

    async def died(self) -> str:
        """See `Adapter.died`: vLLM reports its core's death only to a health check."""
        while True:
            await asyncio.sleep(_POLL_S)  # vLLM does not notify
            try:
                await self.llm.check_health()
            except self.lib.dead as error:
                return f"vLLM's engine core died: {error}"

    async def stop(self, *, is_broken: bool) -> None:  # noqa: ARG002  vLLM's shutdown ends either way
        llm, self.llm = self.llm, None
        if llm is not None:
            await self._releases.stop()
            llm.shutdown()

    async def _warm_up(self) -> None:
        """Run the step sizes that compile new kernel variants, so that no client waits for them."""
        config = self.llm.vllm_config
        longest = min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len - 2)
        runs = [(length, None) for length in warm_up_lengths(longest)] + [(1, n) for n in WARM_UP_LOGPROBS]
        for number, (length, logprobs) in enumerate(runs):
            params = self.lib.sampling_params(
                max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
            )
            prompt = {"prompt_token_ids": [number] * length}  # no common prefix to cache
            async for _ in self.llm.generate(prompt, params, f"warm-up-{number}"):
                pass

    def _info(self, config: Any) -> EngineInfo:
        dtype = str(config.cache_config.cache_dtype)
        return EngineInfo(
            engine="vllm",
            engine_version=self.version,
            context_length=config.model_config.max_model_len,
            kv_layout=KvLayout(
                dtype=str(config.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
                tokens_per_block=config.cache_config.block_size,
                num_layers=self.model.num_layers,
                num_kv_heads=self.model.num_kv_heads,
                head_dim=self.model.head_dim,
                tensor_parallel_size=config.parallel_config.tensor_parallel_size,
                draft=self._draft,
            ),
            # NIXL refuses a peer with a different model path.
            kv_transfer=f"nixl:{quote(config.model_config.model)}" if self._transfers else "",
            max_batch_size=config.scheduler_config.max_num_seqs,
            max_queue_size=self.loaded.values[QUEUE_SIZE],
        )

    def _place(self, call: Call) -> int:
        """vLLM's priority, lower is sooner. Among equals, each waits as if it had come later, by what it has
        to compute: a short turn overtakes long prompts, which never wait longer than that for later ones."""
        num_tokens = call.num_lacking() if call.transfer is None else 0
        due_s = asyncio.get_running_loop().time() + num_tokens / _OVERTAKEN_TOKENS_PER_S
        return call.request.priority * _PRIORITY_MS + round(due_s * 1000)


def _finish_reason(reason: str | None, call: Call) -> FinishReason | None:
    match reason:
        case None | "stop" | "length":
            return reason
        case "error" if call.transfer is not None and not call.num_new_tokens:
            raise HandoffFailed("the KV did not arrive: its source is gone or has dropped it")
        case "abort":  # Baton does not read what it aborts: a signal ended the engine
            raise WorkerLost("vLLM aborted the request as it shut down")
        case _:
            raise EngineFailure(f"vLLM ended the request with {reason!r}; its log says why")


class _SchedulerFigures:
    """One of vLLM's stat loggers, which calls `record` after each step (duck-typed).

    `on_failed_pull` is called when a transfer from a prefill worker has failed: vLLM does not report which.
    The call precedes every token of that request."""

    def __init__(self) -> None:
        self.on_failed_pull: Callable[[], None] = lambda: None
        self.num_blocks = 0
        self.last = WorkerStats()
        self._pulls: deque[tuple[float, float]] = deque(maxlen=_MAX_PULLS)  # (end, duration)

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:  # noqa: ARG002  vLLM's
        """Record vLLM's SchedulerStats of one step, or None."""
        if scheduler_stats is None:
            return
        transfers = scheduler_stats.kv_connector_stats or {}
        skipped = getattr(scheduler_stats, "num_skipped_waiting_reqs", 0)
        guesses = getattr(scheduler_stats, "spec_decoding_stats", None)
        num_right = guesses.num_accepted_tokens if guesses is not None else 0
        num_wrong = guesses.num_draft_tokens - num_right if guesses is not None else 0
        self.last = WorkerStats(
            num_running=scheduler_stats.num_running_reqs,
            num_waiting=scheduler_stats.num_waiting_reqs + skipped,
            kv_used_blocks=round(scheduler_stats.kv_cache_usage * self.num_blocks),
            kv_moved_bytes=self.last.kv_moved_bytes + int(sum(transfers.get("bytes_transferred", ()))),
            kv_move_s=self.last.kv_move_s + sum(transfers.get("transfer_duration", ())),
            num_accepted_guesses=self.last.num_accepted_guesses + num_right,
            num_rejected_guesses=self.last.num_rejected_guesses + num_wrong,
        )
        self._pulls.extend((time.perf_counter(), each) for each in transfers.get("transfer_duration", ()))
        if transfers.get("num_failed_transfers"):
            self.on_failed_pull()

    def longest_pull_s(self, since_s: float) -> float:
        """Of those that have ended since then, which are not known by request."""
        return max((lasted_s for ended_s, lasted_s in self._pulls if ended_s > since_s), default=0.0)

    def ignore(self, *_: Any, **__: Any) -> None:
        """What vLLM reports besides: the worker logs its own readiness, and no engine sleeps."""

    log_engine_initialized = log = record_sleep_state = ignore


class _Releases:
    """Ends pins in vLLM's processes before their lease does; ids that arrive meanwhile go together."""

    def __init__(self) -> None:
        self._times_left: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, llm: Any, request_id: str) -> None:
        self._times_left[request_id] = _MAX_RELEASES
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send(llm), name="release-kv")

    async def stop(self) -> None:
        """Leave the remaining pins to their leases."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send(self, llm: Any) -> None:
        while sent := self._times_left:
            self._times_left = {}
            try:
                answers = await llm.collective_rpc("release_kv", timeout=_RELEASE_S, args=(list(sent),))
            except Exception as error:  # noqa: BLE001  the engine is dead or slow: the lease frees them
                log.warning("pins not released num=%d error=%r", len(sent), error)
                continue
            again = {request_id for answer in answers for request_id in answer or ()}
            self._times_left |= {i: sent[i] - 1 for i in again if sent[i] > 1}
            if again:
                await asyncio.sleep(_RELEASE_AGAIN_S)  # their leases begin with vLLM's next step
