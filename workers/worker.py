"""The life of a worker: start the engine, serve, register, warm up, drain, stop."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import asdict, replace

from baton.connect import Wires
from baton.errors import InvalidRequest
from baton.loop_delay import Delay, LoopDelay
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    PrefillFirst,
    Reply,
    Request,
    Role,
    StatsRequest,
    TokenChunk,
    WorkerInfo,
)
from baton.process import first_of, needed
from baton.telemetry import unauthenticated
from workers.checkpoint import fingerprint
from workers.engine import Engine, EngineInfo
from workers.flags import WorkerSettings
from workers.registration import stay_registered
from workers.scoring import score

log = logging.getLogger(__name__)

# Frontends may pick this worker until they see its withdrawal.
WITHDRAWAL_SEEN_S = 0.5


class Worker:
    """One engine in one role, as a Transport handler. `identity`: the worker's id and incarnation."""

    def __init__(self, engine: Engine, role: Role, identity: tuple[str, str]) -> None:
        self._engine = engine
        self._role = role
        self._delays = LoopDelay()
        self._delays.start()
        self._worker_id, self._incarnation = identity
        self._num_running = 0
        self._num_prefilling_tokens = 0  # local prefills
        self._idle = asyncio.Event()
        self._idle.set()

    async def answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        if isinstance(request, StatsRequest):
            yield replace(self._engine.stats(), num_strange_messages=unauthenticated.num_messages)
            return
        if not isinstance(request, GenerateRequest):
            raise InvalidRequest("a worker answers requests for tokens and statistics only")
        self._num_running += 1
        self._idle.clear()
        since_s = self._delays.seen_s
        try:
            async with aclosing(self._run(request)) as replies:
                async for reply in replies:
                    if isinstance(reply, TokenChunk) and reply.usage is None:
                        yield reply
                    else:
                        yield self._completed(reply, self._delays.longest(since_s))
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    def _run(self, request: GenerateRequest) -> AsyncGenerator[Reply, None]:
        if self._role is Role.PREFILL:
            return self._engine.prefill(request)
        if request.handoff is None and request.local_prefill_tokens is not None:
            return self._prefill_locally(request, request.local_prefill_tokens)
        return self._engine.decode(request)

    def _completed(self, reply: Reply, delay: Delay) -> Reply:
        """With what the engine does not know."""
        delays = {"delay_s": delay.lasted_s, "starved_s": delay.starved_s}
        if isinstance(reply, KvHandoff):
            return replace(reply, worker_id=self._worker_id, incarnation=self._incarnation, **delays)
        if isinstance(reply, TokenChunk) and reply.usage is not None:
            return replace(reply, usage=replace(reply.usage, **delays))
        return reply

    async def _prefill_locally(
        self, request: GenerateRequest, max_tokens: int
    ) -> AsyncGenerator[TokenChunk | PrefillFirst, None]:
        """Decode without a prefill worker, unless that would hold up the running answers."""
        num_lacking = self._engine.num_lacking_tokens(request)
        if self._num_prefilling_tokens + num_lacking > max_tokens:
            yield PrefillFirst(num_lacking, is_busy=num_lacking <= max_tokens)
            return
        self._num_prefilling_tokens += num_lacking
        try:
            async with aclosing(self._engine.decode(request)) as chunks:
                async for chunk in chunks:
                    self._num_prefilling_tokens -= num_lacking
                    num_lacking = 0
                    yield chunk
        finally:
            self._num_prefilling_tokens -= num_lacking

    async def drained(self, timeout_s: float) -> None:
        """Wait until nothing runs, for `timeout_s` at most. Prefill calls include pinned handoffs: they end
        when the handoff is pulled, expires or is closed."""
        await asyncio.sleep(WITHDRAWAL_SEEN_S)  # routers that have not seen the withdrawal still send
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            log.warning("drain timeout num_running=%d", self._num_running)


async def run_worker(settings: WorkerSettings, engine: Engine, shutdown: asyncio.Event) -> int:
    """Run from start to stop. Exit status: 0 after a drain, 1 if the engine failed. Raises NotStarted."""
    try:
        await first_of(_reached(settings.wires), shutdown.wait())
        if shutdown.is_set():
            return 0
        try:
            info = await first_of(_started(engine, settings.role), shutdown.wait())
        except Exception as error:  # an engine's library may raise anything
            reason = error if isinstance(error, OSError | ValueError | ImportError) else repr(error)
            log.exception("engine did not start: %s", reason, exc_info=log.isEnabledFor(logging.DEBUG))
            return 1
        if not isinstance(info, EngineInfo):
            return 0
        return await _serve(settings, engine, info, shutdown)
    finally:
        await engine.stop()


async def _reached(wires: Wires) -> None:
    """Before a model loads, for minutes: the servers are there and take these logins; the connections end, as
    engines may fork. Raises NotStarted."""
    if wires.plane == "dynamo":  # its runtime starts once
        return
    discovery, transport = wires.discovery(), wires.transport()
    try:
        await needed(wires.plane_name(), transport.reachable())
        async with aclosing(discovery.watch()) as snapshots:
            await needed(wires.registry_name(), anext(snapshots))
    finally:
        await transport.close()
        await discovery.close()


async def _started(engine: Engine, role: Role) -> EngineInfo:
    info = await engine.start()
    return replace(info, scores=await score(engine, role, info))


async def _serve(settings: WorkerSettings, engine: Engine, info: EngineInfo, shutdown: asyncio.Event) -> int:
    incarnation = secrets.token_hex(8)
    identity = f"{settings.disaggregation_mode}-{incarnation[:8]}", incarnation
    worker = Worker(engine, settings.role, identity)
    discovery, transport = settings.wires.discovery(), settings.wires.transport()
    try:
        await first_of(needed(settings.wires.plane_name(), transport.reachable()), shutdown.wait())
        if shutdown.is_set():
            return 0
        checkpoint = await asyncio.to_thread(fingerprint, settings.model_path)
        async with transport.serve(identity[0], worker.answer) as address:
            card = _card(settings, info, identity, address, checkpoint)
            joined = stay_registered(card, worker.answer, discovery, transport, settings=settings)
            reason = await first_of(joined, shutdown.wait(), engine.failed())
            log.info("withdrawn worker=%s", card.worker_id)
            if isinstance(reason, str):
                log.error("engine failed worker=%s reason=%s", card.worker_id, reason)
                return 1
            await worker.drained(settings.drain_timeout_s)
            return 0
    finally:
        await transport.close()
        await discovery.close()


def _card(
    settings: WorkerSettings, info: EngineInfo, identity: tuple[str, str], address: str, checkpoint: str
) -> WorkerInfo:
    worker_id, incarnation = identity
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=settings.role,
        endpoint=settings.route,
        model=settings.model,
        model_path=str(settings.model_path.resolve()),
        address=address,
        checkpoint=checkpoint,
        name=settings.name,
        host=socket.gethostname(),
        pid=os.getpid(),
        **asdict(info),
    )
