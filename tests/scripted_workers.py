"""Scripted workers and a Generator over them; records requests and open calls."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sized
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.errors import BatonError, WorkerLost
from baton.messages import (
    GenerateRequest,
    KvHandoff,
    Reply,
    Request,
    Role,
    TokenChunk,
    Usage,
    WorkerInfo,
    WorkerStats,
)
from frontend.metrics import Metrics
from frontend.routing.admission import RoutingSettings
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.routing.workers import Calls
from tests.requests import token_request
from tests.waiting import until

Script = Callable[[GenerateRequest], AsyncGenerator[Reply, None]]


def sampled(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The value of a sample on the page of /metrics, if it is there."""
    samples = (
        sample
        for family in text_string_to_metric_families(metrics.page([]).decode())
        for sample in family.samples
    )
    return next((each.value for each in samples if each.name == name and each.labels == labels), None)


class PlaneDouble:
    """What the double of a transport and a discovery does not need in a test."""

    def serve(self, worker_id: str, respond: object) -> AbstractAsyncContextManager[str]:
        raise NotImplementedError

    def register(self, info: WorkerInfo) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    def lose(self, address: str, reason: str) -> None:
        raise NotImplementedError

    is_reachable, problem = False, ""

    async def reachable(self) -> None:
        pass

    async def close(self) -> None:
        pass


class ScriptedWorkers(PlaneDouble):
    """A transport and a discovery with scripted workers; records their requests. All answer their first
    probe, and those that are `answering` later ones, too."""

    def __init__(self, **scripts: Script) -> None:
        self.scripts = scripts
        self.calls: list[tuple[str, GenerateRequest]] = []
        self.open: list[str] = []
        self.metrics = Metrics()
        self.broker_is_away = False
        self.max_batch_size: int | None = None
        self.answering: set[str] = set()
        self.stats: Callable[[], WorkerStats] = WorkerStats
        self._known: set[str] = set()
        self.lost: list[str] = []
        self._joined = asyncio.Event()

    def join(self, name: str, script: Script) -> None:
        """Another worker becomes live."""
        self.scripts[name] = script
        self._joined.set()

    def leave(self, name: str) -> None:
        """A worker withdraws; its calls go on."""
        del self.scripts[name]
        self._joined.set()

    async def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        if not isinstance(request, GenerateRequest):
            if address in self._known and address not in self.answering:
                raise WorkerLost("gone")
            self._known.add(address)
            yield self.stats()
            return
        self.calls.append((address, request))
        self.open.append(address)
        try:
            async with aclosing(self.scripts[address](request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self.open.remove(address)

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        self._known.clear()  # by another frontend
        while True:
            self._joined.clear()
            live = (worker(name) for name in sorted(self.scripts))
            yield tuple(msgspec.structs.replace(w, max_batch_size=self.max_batch_size) for w in live)
            await self._joined.wait()

    def lose(self, address: str, reason: str) -> None:
        self.lost.append(address)

    async def reachable(self) -> None:
        while self.broker_is_away:
            await asyncio.sleep(0.25)  # as NatsTransport asks

    @property
    def called(self) -> list[str]:
        return [address for address, _ in self.calls]


def worker(name: str, **changes: object) -> WorkerInfo:
    """Prefill if its name begins with p; one that ends with x is paired with such only."""
    info = WorkerInfo(
        worker_id=name,
        incarnation=f"{name}.1",
        role=Role.PREFILL if name.startswith("p") else Role.DECODE,
        endpoint="dyn://a.b.c",
        model="m",
        model_path="/none",
        address=name,
        context_length=100,
        engine="scripted",
        engine_version="2" if name.endswith("x") else "1",
    )
    return msgspec.structs.replace(info, **changes)


def request(deadline_s: float = 5.0, priority: int = 0) -> GenerateRequest:
    return token_request([1, 2], max_tokens=4, deadline_s=deadline_s, priority=priority)


HANDOFF = KvHandoff(
    worker_id="p", incarnation="p", first_token=10, num_prompt_tokens=2, ttl_s=9, engine_state=b"kv"
)


def script(*steps: Reply | BatonError | None) -> Script:
    """A worker that sends these replies and raises these errors; None: it hangs."""

    async def run(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        for step in steps:
            if step is None:
                await asyncio.Event().wait()
            elif isinstance(step, BatonError):
                raise step
            else:
                yield step

    return run


hand_off = script(HANDOFF, None)  # pinned until closed
hang = script(None)


async def hand_off_with_first(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
    yield msgspec.structs.replace(HANDOFF, first_chunk=TokenChunk((10 + sent.num_generated,)))
    await asyncio.Event().wait()


async def answer(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
    """Tokens 10, 11, 12, 13: as many as are missing."""
    for position in range(sent.num_generated, 4):
        last = position == 3
        usage = Usage(2, 0, position + 1) if last or position == sent.num_generated else None
        yield TokenChunk((10 + position,), "length" if last else None, usage)


def failing(error: BatonError, after: int = 0) -> Script:
    async def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        for position in range(after):
            yield TokenChunk((10 + sent.num_generated + position,))
        raise error

    return script


@asynccontextmanager
async def generator_over(fleet: ScriptedWorkers, **settings: Any) -> AsyncGenerator[Generator, None]:
    live = Fleet(fleet, fleet, model_path=Path("/none"))
    async with live.keep_current():
        await until(lambda: live.health().instances)
        yield Generator(fleet, live, RoutingSettings(**{"wait_for_worker_s": 0} | settings), fleet.metrics)


async def generate(fleet: ScriptedWorkers, deadline_s: float = 5.0, **settings: Any) -> list[int]:
    async with generator_over(fleet, **settings) as generator:
        try:
            return await token_ids_of(generator, deadline_s)
        finally:
            assert not fleet.open, "every call is closed with the request"


@contextmanager
def waiting(calls: Calls, worker: WorkerInfo, tokens: Sized) -> Iterator[None]:
    """A call that waits for this worker."""
    call = calls.begin(worker, answer(request()), tokens)
    try:
        yield
    finally:
        call.answered()


def in_turn(*scripts: Script) -> Script:
    """A worker that answers each request in its own way; the last one for all that follow."""
    left = list(scripts)

    def script(sent: GenerateRequest) -> AsyncGenerator[Reply, None]:
        return (left.pop(0) if len(left) > 1 else left[0])(sent)

    return script


async def token_ids_of(generator: Generator, deadline_s: float = 5.0) -> list[int]:
    """The answer to one request."""
    return [i async for chunk in generator.generate(request(deadline_s)) for i in chunk.token_ids]
