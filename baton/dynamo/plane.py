"""Dynamo's registry and request plane as Baton's: `Discovery` and `Transport` in one object."""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from baton.discovery import MAX_WORKERS
from baton.dynamo.bodies import release_request
from baton.dynamo.calls import Call, Instance
from baton.dynamo.cards import SCHEME, worker_of
from baton.errors import BatonError, WorkerUnreached
from baton.messages import (
    GenerateRequest,
    PrefillFirst,
    Reply,
    Request,
    Role,
    StatsRequest,
    WorkerInfo,
    WorkerStats,
)
from baton.pace import TICK_S, Pulse
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
_EMPTY_POLLS = 4  # until cards have arrived, after a start of the runtime
_CLOSE_S = 2.0


class _Endpoint:
    """The instances of one endpoint, and their cards."""

    def __init__(self, path: str, client: "Client", cards: "FpmEventSubscriber") -> None:
        self.path = path
        self.client = client
        self._cards = cards
        self.has_ended = False
        self._waiting: asyncio.Task[None] | None = None
        cards.start_tracking()

    def workers(self) -> Iterator[tuple[int, WorkerInfo]]:
        """Those that are registered, by instance: with a card."""
        cards, numbers = self._cards.get_model_cards(), self.client.instance_ids()
        if not numbers and (self._waiting is None or self._waiting.done()):
            self._waiting = asyncio.get_running_loop().create_task(self._wait())
        for number in [number for number in numbers if str(number) in cards][:MAX_WORKERS]:
            if (worker := worker_of(self.path, number, cards[str(number)])) is not None:
                yield number, worker

    async def _wait(self) -> None:
        """Wait for an instance, which fails if the runtime has ended; its lists are then empty."""
        try:
            await self.client.wait_for_instances()
        except Exception:  # noqa: BLE001  the bindings raise no other
            self.has_ended = True


class DynamoPlane:
    """A frontend's `Discovery` and `Transport` over Dynamo's workers at these endpoints, and a worker's.

    * An instance that disappears from the registry goes on with its calls.
    * No prefill of Dynamo's is stopped: its handoff could cross that, and only decode frees the KV.
    * The runtime ends when its lease expires, as in a long stop of this process. A frontend starts anew."""

    def __init__(
        self, start: "Callable[[], Awaitable[DistributedRuntime]]", paths: Sequence[str], liveness_s: float
    ) -> None:
        self._start = start
        self._paths = paths
        self._liveness_s = liveness_s
        self._opening = asyncio.Lock()
        self._runtime: DistributedRuntime | None = None
        self._endpoints: list[_Endpoint] = []
        self._instances: dict[str, Instance] = {}
        self._taken: set[int] = set()  # handoffs, by identity
        self._releasing: set[asyncio.Task[None]] = set()
        self._pulse: Pulse | None = None
        self._served: WorkerEndpoint | None = None

    is_reachable = True
    """`Transport.is_reachable`: the runtime itself connects again."""
    problem = ""

    async def reachable(self) -> None:
        """`Transport.reachable`: the runtime has started."""
        async with self._opening:
            if self._runtime is None:
                self._runtime = await self._start()

    async def _listen(self) -> None:
        """Follow the endpoints, once; this opens the port for their answers."""
        await self.reachable()
        async with self._opening:
            if self._endpoints or self._runtime is None:
                return
            from dynamo.llm import FpmEventSubscriber  # noqa: PLC0415  of an extra

            # Before the first await: they hold Python's lock, which Dynamo's thread needs after an await.
            endpoints = [self._runtime.endpoint(path) for path in self._paths]
            cards = [FpmEventSubscriber(endpoint) for endpoint in endpoints]
            for path, endpoint, own_cards in zip(self._paths, endpoints, cards, strict=True):
                self._endpoints.append(_Endpoint(path, await endpoint.client(), own_cards))
            self._pulse = self._pulse or Pulse(TICK_S, self._tick)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        shown: tuple[WorkerInfo, ...] | None = None
        num_empty = 0
        while True:
            await self._listen()
            snapshot = self._look()
            num_empty = 0 if snapshot else num_empty + 1
            if snapshot != shown and not 0 < num_empty < _EMPTY_POLLS:
                shown = snapshot
                yield snapshot
            await asyncio.sleep(_POLL_S)  # poll: the bindings do not notify

    def _look(self) -> tuple[WorkerInfo, ...]:
        if any(endpoint.has_ended for endpoint in self._endpoints):
            log.warning("dynamo_runtime=ended action=restart")
            self._end("this process lost its lease in Dynamo's registry")
            return ()
        found = {
            worker.address: Instance(endpoint.client, number, worker, self._liveness_s)
            for endpoint in self._endpoints
            for number, worker in endpoint.workers()
        }
        known = {key: each for key, each in self._instances.items() if key in found or each.calls}
        self._instances = found | known
        return tuple(sorted((each.worker for each in found.values()), key=lambda worker: worker.worker_id))

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        instance = self._instances.get(address)
        if instance is None:
            raise WorkerUnreached(f"{address} is not registered")
        is_dynamos, handoff = not instance.is_own, None
        if is_dynamos and isinstance(request, StatsRequest):
            canary = instance.probe()
            await asyncio.wait([canary.task])
            await canary.replies.take()
            yield WorkerStats(num_running=len(instance.calls))
            return
        if is_dynamos and isinstance(request, GenerateRequest):
            handoff, most = request.handoff, request.local_prefill_tokens
            if handoff is None and most is not None and len(request.token_ids) > most:
                yield PrefillFirst(len(request.token_ids), is_busy=False)
                return
        call = instance.begin(request)
        is_releasing = is_dynamos and instance.worker.role is Role.PREFILL
        if handoff is not None:
            self._taken.add(id(handoff))
        try:
            while replies := await call.replies.take():
                for reply in replies:
                    yield reply
        except WorkerUnreached:
            is_releasing = handoff is not None
            raise
        finally:
            if is_releasing:
                task = asyncio.get_running_loop().create_task(self._release(call))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)
            else:
                call.leave()

    async def _release(self, call: Call) -> None:
        """If decode has not taken what prefill's call hands over, because the client has left, or if decode's
        call has not reached its worker, have a decode worker compute one token, which frees the KV."""
        await asyncio.wait([call.task])
        request, handoff = call.request, call.handoff
        if not isinstance(request, GenerateRequest) or id(handoff) in self._taken:
            self._taken.discard(id(handoff))
            return
        if (handoff := handoff or request.handoff) is None:
            return
        asked = release_request(request, handoff)
        decodes = [
            each
            for each in self._instances.values()
            if each.worker.role is Role.DECODE and each.worker.model == request.model
            if not each.is_own and not each.worker.refusal
        ]
        for instance in random.sample(decodes, len(decodes)):
            try:
                call = instance.begin(asked)
                while await call.replies.take():
                    pass
            except WorkerUnreached:
                continue
            except BatonError as error:
                log.info(Line("handoff not released", request_id=request.request_id, error=error.message))
            return

    def lose(self, address: str, reason: str) -> None:
        if (instance := self._instances.get(address)) is not None:
            instance.lose(reason)

    def _end(self, reason: str) -> list[asyncio.Task[None]]:
        """End every call, and the runtime; the tasks of the calls."""
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            instance.lose(reason)
        self._endpoints.clear()
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.shutdown()
        return [call.task for instance in instances.values() for call in instance.calls]

    async def close(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=_CLOSE_S)
        tasks = [*self._releasing, *self._end(CLOSED)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
