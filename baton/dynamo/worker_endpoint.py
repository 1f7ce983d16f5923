"""A worker of Baton's as an instance of a Dynamo endpoint, behind Dynamo's frontend or Baton's."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model, unregister_model
from dynamo.llm.exceptions import ConnectionTimeout, Disconnected, EngineShutdown, InvalidArgument, Unknown
from dynamo.runtime import Context, DistributedRuntime

from baton.dynamo.bodies import CANARY
from baton.dynamo.cards import OWN
from baton.dynamo.messages import DynamoRequest
from baton.dynamo.own import own_body, own_request
from baton.dynamo.worker_messages import dynamo_chunk, generate_request, prefill_answer
from baton.errors import BatonError, EngineFailure, InvalidRequest, WorkerLost
from baton.messages import (
    NO_TOKEN,
    KvHandoff,
    Role,
    StatsRequest,
    TokenChunk,
    WorkerInfo,
    WorkerStats,
    after_handoff,
)
from baton.model_folder import control_ids
from baton.streams import Replies
from baton.telemetry import Line
from baton.transport import Respond

log = logging.getLogger(__name__)

_TOKENS_PER_BLOCK = 16  # of an engine that does not say
_CLOSE_S = 5.0
_STATS_S = 1.0
# What Dynamo's frontend makes of them: 400 with the text, 504, 503, 503 without requests for 5 s, else 500.
_ERRORS: dict[str, type[Exception]] = {
    "invalid_request": InvalidArgument,
    "deadline_exceeded": ConnectionTimeout,
    "handoff_failed": Disconnected,
    "handoff_stalled": Disconnected,
    "overloaded": Disconnected,
    "worker_lost": EngineShutdown,
    "not_ready": EngineShutdown,
}
"""By Baton's code; others are Unknown."""


class WorkerEndpoint:
    """A worker in Dynamo's registry: callers see it once served, clients once its model is registered."""

    def __init__(
        self, runtime: DistributedRuntime, respond: Respond, on_loss: Callable[[], object] = lambda: None
    ) -> None:
        """`on_loss`: the runtime has ended by itself, as it does when its lease expires."""
        self.loss = ""
        self._is_closed = False
        self._on_loss = on_loss
        self._runtime = runtime
        self._respond = respond
        self._card: WorkerInfo
        self._start_id = NO_TOKEN
        self._serving: asyncio.Future[None] | None = None
        self._has_model = False
        self._answers: dict[asyncio.Task[None], Replies] = {}

    async def show(self, card: WorkerInfo) -> None:
        """Register what the card says; a worker that is not ready has no model for clients yet."""
        self._card = card
        if self._serving is None:
            self._endpoint = self._runtime.endpoint(card.endpoint)
            ids = await asyncio.to_thread(control_ids, Path(card.model_path))
            self._start_id = ids.get("<|start|>", NO_TOKEN)
            loop = asyncio.get_running_loop()
            self._endpoint.metrics.register_prometheus_expfmt_callback(partial(self._metrics, loop))
            self._serving = asyncio.ensure_future(
                self._endpoint.serve_endpoint(
                    self._answer,
                    metrics_labels=[("model", card.model)],
                    health_check_payload=msgspec.to_builtins(CANARY),
                )
            )
            self._serving.add_done_callback(self._ended)
        if card.is_ready and not self._has_model:
            await self._register_model(card)
            self._has_model = True

    async def withdraw(self, card: WorkerInfo) -> None:
        """Leave the registry, unless another card replaced this one; running answers go on."""
        if card is not self._card:
            return
        if self._has_model:
            await unregister_model(self._endpoint)
        await self._endpoint.unregister_endpoint_instance()

    async def close(self) -> None:
        """End every answer and stop serving."""
        self._is_closed = True
        for task, answer in self._answers.items():
            answer.end(WorkerLost("the worker has stopped"))
            task.cancel()
        waits = [*self._answers, *([self._serving] if self._serving else ())]
        self._runtime.shutdown()
        if waits:
            await asyncio.wait(waits, timeout=_CLOSE_S)

    def _ended(self, serving: "asyncio.Future[None]") -> None:
        if not self._is_closed:
            why = "cancelled" if serving.cancelled() else serving.exception()
            self.loss = f"Dynamo's runtime ended: {why or 'its registry was away for longer than a lease'}"
            self._on_loss()

    async def _stats(self) -> WorkerStats:
        (stats,) = [reply async for reply in self._respond(StatsRequest())]
        assert isinstance(stats, WorkerStats)
        return stats

    def _metrics(self, loop: asyncio.AbstractEventLoop) -> str:
        """The worker's figures for Dynamo's `/metrics`, whose thread calls this."""
        stats = asyncio.run_coroutine_threadsafe(self._stats(), loop).result(_STATS_S)
        return "".join(
            f"baton_worker_{name} {value}\n" for name, value in msgspec.structs.asdict(stats).items()
        )

    async def _register_model(self, card: WorkerInfo) -> None:
        """As `dynamo.trtllm` does; but a decode worker also serves without a prefill worker."""
        stats = await self._stats()
        config = ModelRuntimeConfig()
        config.context_length = card.context_length
        if card.max_batch_size is not None:
            config.max_num_seqs = card.max_batch_size
        if stats.kv_blocks:
            config.total_kv_blocks = stats.kv_blocks
        config.reasoning_parser, config.tool_call_parser = "gpt_oss", "harmony"
        config.set_engine_specific(OWN, msgspec.json.encode(card).decode())
        model_type, kinds = ModelType.Chat | ModelType.Completions, WorkerType
        kind, needs = kinds.Aggregated, []
        if card.role is Role.PREFILL:
            model_type, kind, needs = ModelType.Prefill, kinds.Prefill, [[kinds.Decode]]
        elif card.kv_transfer:
            kind, needs = kinds.Decode, [[kinds.Prefill], [kinds.Decode]]
        await register_model(
            ModelInput.Tokens,
            model_type,
            self._endpoint,
            card.model_path,
            card.model,
            worker_type=kind,
            kv_cache_block_size=card.kv_layout.tokens_per_block if card.kv_layout else _TOKENS_PER_BLOCK,
            runtime_config=config,
            needs=needs,
        )

    async def _answer(self, body: Any, context: Context) -> AsyncGenerator[Any, None]:
        """Dynamo's handler: the items of one answer. A body of bytes is from a process of Baton's."""
        answer, is_own = Replies(), isinstance(body, bytes)
        task = asyncio.create_task(self._work(body, context, answer))
        self._answers[task] = answer
        task.add_done_callback(self._answers.pop)

        def stop(_: object = None) -> None:
            answer.leave()
            # Once; and KV whose handoff was read stays pinned.
            if (answer.num_waiting or not answer.has_ended) and not task.cancelling():
                task.cancel()

        stopped = context.async_killed_or_stopped()
        stopped.add_done_callback(stop)
        try:
            while replies := await answer.take():
                if is_own:
                    yield own_body(replies)
                    continue
                for reply in replies:
                    assert isinstance(reply, KvHandoff | TokenChunk)
                    yield msgspec.to_builtins(dynamo_chunk(reply, self._card))
        except BatonError as error:
            if not is_own:
                log.info(Line("request failed", request_id=context.id(), error=repr(error)))
                raise _ERRORS.get(error.code, Unknown)(error.message) from None
            yield own_body(error.to_wire())
        finally:
            stopped.cancel()
            stop()

    async def _work(self, body: Any, context: Context, answer: Replies) -> None:
        """Fill `answer`. After a handoff to Dynamo it has ended, but this runs on while the KV is pinned."""
        try:
            if isinstance(body, bytes):
                async with aclosing(self._respond(own_request(body))) as replies:
                    async for reply in replies:
                        await answer.put(reply)
            else:
                await self._work_for_dynamo(body, context, answer)
        except BatonError as error:
            answer.end(error)
        except Exception:  # process edge: any engine error goes to the caller
            log.exception(Line("answer failed", request_id=context.id()))
            answer.end(EngineFailure(f"the engine failed on request {context.id()}; see the worker's log"))
        finally:
            answer.end()

    async def _work_for_dynamo(self, body: Any, context: Context, answer: Replies) -> None:
        try:
            asked = msgspec.convert(body, DynamoRequest, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the request is not served: {error}") from error
        request = generate_request(asked, self._card, context.id(), self._start_id)
        request = msgspec.structs.replace(request, trace_headers=context.trace_headers())
        if asked.prefill_result is not None and self._card.role is Role.DECODE:
            prefilled = prefill_answer(asked.prefill_result.disaggregated_params, self._card)
            if isinstance(prefilled, TokenChunk):
                await answer.put(prefilled)
                return
            if request.sampling.max_tokens == 1:  # which prefill did not know: decode draws the token again
                prefilled = msgspec.structs.replace(prefilled, first_chunk=None)
            request = after_handoff(request, prefilled)
            if prefilled.first_chunk is not None:
                await answer.put(prefilled.first_chunk)
        async with aclosing(self._respond(request)) as replies:
            async for reply in replies:
                if isinstance(reply, KvHandoff) and asked.is_health_check:  # nobody takes the KV
                    await answer.put(TokenChunk((max(reply.first_token, 0),), "length"))
                    return
                await answer.put(reply)
                if isinstance(reply, KvHandoff):
                    answer.end()
