"""Dynamo's registry and request plane as Baton's: `Discovery` and `Transport` in one object."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.discovery import MAX_WORKERS
from baton.dynamo.bodies import Decoded, Prefilled, release_request
from baton.dynamo.calls import Call, Instance
from baton.dynamo.cards import SCHEME, worker_of
from baton.dynamo.runtime import RuntimeSettings
from baton.errors import BatonError, InvalidRequest, WorkerUnreached
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    PrefillFirst,
    Reply,
    Request,
    Role,
    StatsRequest,
    WorkerInfo,
    WorkerStats,
)
from baton.pace import TICK_S, Pulse
from baton.pairing import why_not_paired
from baton.process import NotStarted
from baton.streams import CLOSED
from baton.telemetry import Line
from baton.transport import Respond

if TYPE_CHECKING:
    from dynamo.llm import FpmEventSubscriber
    from dynamo.runtime import Client, DistributedRuntime

    from baton.dynamo.worker_endpoint import WorkerEndpoint

log = logging.getLogger(__name__)

_POLL_S = 0.25
_FIRST_S = 1.0  # until the cards that are there at the start have arrived
_RELEASE_S = 60.0
_CLOSE_S = 2.0


class _Endpoint:
    """The instances of one endpoint, and their cards."""

    def __init__(self, path: str, client: "Client", cards: "FpmEventSubscriber") -> None:
        self.path = path
        self.client = client
        self._cards = cards
        cards.start_tracking()

    def workers(self) -> dict[int, WorkerInfo]:
        """Those that are registered: with an instance and a card."""
        cards = self._cards.get_model_cards()
        known = [number for number in self.client.instance_ids() if str(number) in cards][:MAX_WORKERS]
        found = {number: worker_of(self.path, number, cards[str(number)]) for number in known}
        return {number: worker for number, worker in found.items() if worker is not None}


class DynamoPlane:
    """A frontend's `Discovery` and `Transport` over Dynamo's workers at these endpoints, and a worker's.

    * An instance that disappears from the registry goes on with its calls.
    * KV that prefill has handed over is freed by decode only: if the client leaves between them, decode is
      asked for one token. So no prefill is stopped either: its handoff could cross that.
    """

    def __init__(self, settings: RuntimeSettings, paths: Sequence[str], liveness_s: float) -> None:
        self._settings = settings
        self._paths = paths
        self._liveness_s = liveness_s
        self._opening = asyncio.Lock()
        self._runtime: DistributedRuntime | None = None
        self._endpoints: list[_Endpoint] = []
        self._instances: dict[str, Instance] = {}
        self._unclaimed: dict[int, KvHandoff] = {}  # by identity: those that decode has not been asked for
        self._releasing: set[asyncio.Task[None]] = set()
        self._pulse: Pulse | None = None
        self._served: WorkerEndpoint | None = None

    is_reachable = True
    """`Transport.is_reachable`: the runtime itself connects again."""

    async def reachable(self) -> None:
        """`Transport.reachable`: the runtime has started."""
        async with self._opening:
            if self._runtime is None:
                self._runtime = await self._settings.start()

    async def _listen(self) -> None:
        """Follow the endpoints, once; this opens the port for their answers."""
        await self.reachable()
        async with self._opening:
            if self._pulse is not None or self._runtime is None:
                return
            from dynamo.llm import FpmEventSubscriber  # noqa: PLC0415  of an extra

            for path in self._paths:
                endpoint = self._runtime.endpoint(path)
                client = await endpoint.client()
                self._endpoints.append(_Endpoint(path, client, FpmEventSubscriber(endpoint)))
            self._pulse = Pulse(TICK_S, self._tick)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        """`Discovery.watch`."""
        await self._listen()
        shown: tuple[WorkerInfo, ...] | None = None
        until_s = asyncio.get_running_loop().time() + _FIRST_S
        while True:
            snapshot = self._look()
            is_early = not snapshot and asyncio.get_running_loop().time() < until_s
            if snapshot != shown and not is_early:
                shown = snapshot
                yield snapshot
            await asyncio.sleep(_POLL_S)  # poll: the bindings do not notify

    def _look(self) -> tuple[WorkerInfo, ...]:
        found = {
            worker.address: Instance(endpoint.client, number, worker, self._liveness_s)
            for endpoint in self._endpoints
            for number, worker in endpoint.workers().items()
        }
        known = {key: each for key, each in self._instances.items() if key in found or each.calls}
        self._instances = found | known
        return tuple(sorted((each.worker for each in found.values()), key=lambda worker: worker.worker_id))

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        """`Transport.call`."""
        instance = self._instances.get(address)
        if instance is None:
            raise WorkerUnreached(f"{address} is not registered")
        if isinstance(request, StatsRequest):
            await instance.probe()
            yield WorkerStats(num_running=instance.num_requests)
            return
        if not isinstance(request, GenerateRequest):
            raise InvalidRequest("Dynamo's workers answer requests for tokens only")
        num_tokens, most = len(request.token_ids), request.local_prefill_tokens
        if request.handoff is None and most is not None and num_tokens > most:
            yield PrefillFirst(num_tokens, is_busy=False)  # what decode has in its cache is not known
            return
        handoff, body = request.handoff, instance.body(request)
        is_prefill = instance.worker.role is Role.PREFILL
        reader = Prefilled(request, instance.worker) if is_prefill else Decoded(request)
        call = instance.begin(body, reader, request.request_id, request.deadline_s)
        self._unclaimed.pop(id(handoff), None)
        try:
            async for reply in call.replies():
                if isinstance(reply, KvHandoff):
                    handoff = reply
                    self._unclaimed[id(reply)] = reply
                yield reply
        except WorkerUnreached:
            if handoff is not None:
                self._unclaimed[id(handoff)] = handoff
                self._release(request, call, handoff)
            raise
        finally:
            if is_prefill:
                self._release(request, call, handoff)
            else:
                call.leave()

    def _release(self, request: GenerateRequest, call: Call, handoff: KvHandoff | None) -> None:
        """Have KV freed that prefill has handed over, or will, unless decode is asked for it."""
        task = asyncio.get_running_loop().create_task(self._ask_decode(request, call, handoff))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _ask_decode(self, request: GenerateRequest, prefill: Call, handoff: KvHandoff | None) -> None:
        """Ask decode workers, one after the other, for one token of it."""
        try:
            if handoff is None:
                (handoff,) = [reply async for reply in prefill.replies() if isinstance(reply, KvHandoff)]
            elif self._unclaimed.pop(id(handoff), None) is None:
                return
        except (BatonError, ValueError):
            return  # prefill has handed nothing over
        asked = release_request(request, handoff)
        for instance in self._decodes(request.model, handoff.incarnation):
            call = instance.begin(instance.body(asked), Decoded(asked), "release", _RELEASE_S)
            try:
                async for _ in call.replies():
                    pass
            except BatonError as error:
                log.info(Line("handoff not released", request_id=request.request_id, error=error.message))
            else:
                return

    def _decodes(self, model: str, source: str) -> list[Instance]:
        """The decode workers for KV of the prefill worker with this incarnation, in any order."""
        instances = [i for i in self._instances.values() if i.worker.model == model and not i.worker.refusal]
        sources = [instance.worker for instance in instances if instance.worker.incarnation == source]
        decodes = [instance for instance in instances if instance.worker.role is Role.DECODE]
        paired = [d for d in decodes if not any(why_not_paired(prefill, d.worker) for prefill in sources)]
        return random.sample(paired, len(paired))

    def lose(self, address: str, reason: str) -> None:
        """`Transport.lose`."""
        if (instance := self._instances.get(address)) is not None:
            instance.lose(reason)

    async def close(self) -> None:
        """`Transport.close` and `Discovery.close`."""
        if self._pulse is not None:
            self._pulse.stop()
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=_CLOSE_S)
        calls = [call.task for instance in self._instances.values() for call in instance.calls]
        tasks = [*self._releasing, *calls]
        for instance in self._instances.values():
            instance.lose(CLOSED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.shutdown()

    @asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:  # noqa: ARG002  ids are the registry's
        """`Transport.serve`; the first registration says at which endpoint."""
        from baton.dynamo.worker_endpoint import WorkerEndpoint  # noqa: PLC0415  of an extra

        await self.reachable()
        task = asyncio.current_task()
        assert self._runtime is not None
        assert task is not None
        served = self._served = WorkerEndpoint(self._runtime, respond, task.cancel)
        try:
            yield SCHEME
        except asyncio.CancelledError:
            if not served.loss:
                raise
            task.uncancel()
            raise NotStarted(f"{served.loss}; start this worker again") from None
        finally:
            await served.close()

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncIterator[None]:
        """`Discovery.register`, of the worker that is served."""
        assert self._served is not None
        await self._served.show(info)
        try:
            yield
        finally:
            await self._served.withdraw(info)

    def _tick(self) -> None:
        for instance in self._instances.values():
            instance.tick()
