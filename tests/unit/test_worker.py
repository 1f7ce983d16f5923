"""A worker's life: it answers in its role, drains its requests, and ends with its engine."""

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.connect import Wires
from baton.errors import InvalidRequest, WorkerLost
from baton.messages import (
    FrontendRequest,
    GenerateRequest,
    KvHandoff,
    KvLayout,
    PrefillFirst,
    Role,
    StatsRequest,
    TokenChunk,
    Usage,
    WorkerInfo,
    WorkerStats,
)
from baton.process import NotStarted
from baton.telemetry import unauthenticated
from tests.clock import jumping, now_s
from tests.generators import none_abandoned
from tests.registry import Snapshot, worker
from tests.requests import token_request
from tests.waiting import PATIENCE_S, until
from workers.checkpoint import fingerprint
from workers.engine import EngineInfo
from workers.flags import WorkerSettings
from workers.worker import Worker, run_worker

REQUEST = token_request([1], max_tokens=1, deadline_s=5)

HANDOFF = KvHandoff(first_token=1, num_prompt_tokens=1, ttl_s=9, engine_state=b"")
LAYOUT = KvLayout(dtype="f", tokens_per_block=2, num_layers=1, num_kv_heads=1, head_dim=1)


class ScriptedEngine:
    """An engine whose answers wait for `go_on`; it fails on demand."""

    num_lacking = 0

    def __init__(self, start_error: Exception | None = None, kv_transfer: str = "") -> None:
        self.kv_transfer = kv_transfer
        self.go_on = asyncio.Event()
        self.prompt_done = asyncio.Event()
        self.prompt_done.set()
        self.broken = asyncio.Event()
        self.num_closed = 0
        self.stopped = False
        self._start_error = start_error

    async def start(self) -> EngineInfo:
        if self._start_error:
            raise self._start_error
        return EngineInfo(
            engine="scripted",
            engine_version="1",
            context_length=10,
            kv_layout=LAYOUT,
            kv_transfer=self.kv_transfer,
            max_batch_size=3,
            max_queue_size=5,
        )

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        yield HANDOFF

    def num_lacking_tokens(self, request: GenerateRequest) -> int:
        return self.num_lacking

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        try:
            await self.prompt_done.wait()
            yield TokenChunk((1,))
            await self.go_on.wait()
            yield TokenChunk((2,), "length")
        finally:
            self.num_closed += 1

    def stats(self) -> WorkerStats:
        return WorkerStats(num_running=7)

    async def failed(self) -> str:
        await self.broken.wait()
        return "the GPU fell off"

    async def stop(self) -> None:
        self.stopped = True


async def test_a_decode_worker_computes_what_it_lacks_up_to_the_limit_at_a_time() -> None:
    engine = ScriptedEngine()
    worker = Worker(engine, Role.DECODE, ("w1", "i1"))
    local = msgspec.structs.replace(REQUEST, local_prefill_tokens=100)
    engine.num_lacking = 101
    assert [r async for r in worker.answer(local)] == [PrefillFirst(101, is_busy=False)]
    engine.num_lacking = 60
    engine.prompt_done.clear()
    first, second = worker.answer(local), worker.answer(local)
    async with aclosing(first), aclosing(second):
        answered = asyncio.create_task(anext(first))
        await asyncio.sleep(0)  # it has been asked
        assert [r async for r in worker.answer(local)] == [PrefillFirst(60, is_busy=True)]
        engine.num_lacking = 100
        assert [r async for r in worker.answer(local)] == [PrefillFirst(100, is_busy=True)]
        engine.num_lacking = 40
        waiting = asyncio.create_task(anext(second))
        await asyncio.sleep(0)  # it waits now
        engine.num_lacking = 1
        assert [r async for r in worker.answer(local)] == [PrefillFirst(1, is_busy=True)]
        waiting.cancel()
        await asyncio.wait([waiting])
        engine.num_lacking = 41
        assert [r async for r in worker.answer(local)] == [PrefillFirst(41, is_busy=True)]
        engine.prompt_done.set()
        assert isinstance(await answered, TokenChunk)
        engine.num_lacking = 100
        with none_abandoned():
            async with aclosing(worker.answer(local)) as third:
                assert isinstance(await anext(third), TokenChunk)
        engine.num_lacking = 101  # not one more, whatever has ended
        async with aclosing(worker.answer(local)) as fourth:
            assert await anext(fourth) == PrefillFirst(101, is_busy=False)


async def test_with_a_handoff_or_without_a_limit_any_prompt_is_decoded() -> None:
    engine = ScriptedEngine()
    engine.num_lacking = 10**6
    worker = Worker(engine, Role.DECODE, ("w1", "i1"))
    handed = msgspec.structs.replace(REQUEST, local_prefill_tokens=0, handoff=HANDOFF)
    for request in (REQUEST, handed):
        async with aclosing(worker.answer(request)) as replies:
            assert isinstance(await anext(replies), TokenChunk)


async def test_each_role_runs_its_half_and_both_tell_their_figures() -> None:
    prefill, decode = (
        Worker(ScriptedEngine(), Role.PREFILL, ("w1", "i1")),
        Worker(ScriptedEngine(), Role.DECODE, ("w1", "i1")),
    )
    identified = msgspec.structs.replace(HANDOFF, worker_id="w1", incarnation="i1")
    handoff = await anext(prefill.answer(REQUEST))
    assert isinstance(handoff, KvHandoff)
    assert msgspec.structs.replace(handoff, delay_s=0.0, starved_s=0.0) == identified
    assert isinstance(await anext(decode.answer(REQUEST)), TokenChunk)
    unauthenticated.note("a test")
    expected = WorkerStats(num_running=7, num_strange_messages=unauthenticated.num_messages)
    assert expected.num_strange_messages > 0
    assert [reply async for reply in decode.answer(StatsRequest())] == [expected]
    with pytest.raises(InvalidRequest):
        await anext(decode.answer(FrontendRequest(data=b"")))


class StandingEngine(ScriptedEngine):
    """Blocks the event loop before the first reply, and before the last."""

    async def prefill(self, request: GenerateRequest) -> AsyncGenerator[KvHandoff | TokenChunk, None]:
        time.sleep(0.2)  # noqa: ASYNC251  the loop stands still
        async for handoff in super().prefill(request):
            yield handoff

    async def decode(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        for pause_s, token_id in ((0.2, 1), (0.0, 2), (0.6, 3)):
            time.sleep(pause_s)  # noqa: ASYNC251  the loop stands still
            yield TokenChunk((token_id,), None, Usage(1, 0, token_id, 5, 1.0, 2.0, 3.0) if pause_s else None)


async def test_replies_have_the_longest_time_that_the_loop_stood_still_so_far() -> None:
    prefill = Worker(StandingEngine(), Role.PREFILL, ("w1", "i1"))
    handoff = await anext(prefill.answer(REQUEST))
    assert isinstance(handoff, KvHandoff)
    assert handoff.delay_s > 0.1
    decode = Worker(StandingEngine(), Role.DECODE, ("w2", "i2"))
    chunks = [reply async for reply in decode.answer(REQUEST) if isinstance(reply, TokenChunk)]
    first, none, last = [chunk.usage for chunk in chunks]
    assert none is None
    assert first is not None
    assert last is not None
    assert msgspec.structs.replace(last, delay_s=0.0, starved_s=0.0) == Usage(1, 0, 3, 5, 1.0, 2.0, 3.0)
    assert 0.1 < first.delay_s <= last.delay_s
    assert last.delay_s > 0.5


@jumping
async def test_draining_serves_those_who_have_not_seen_the_withdrawal_yet() -> None:
    engine = ScriptedEngine()
    worker = Worker(engine, Role.DECODE, ("w1", "i1"))
    began_s = now_s()
    draining = asyncio.create_task(worker.drained(10))
    await asyncio.sleep(0.4)
    late = worker.answer(REQUEST)
    await anext(late)
    await asyncio.sleep(5)  # virtual time
    assert not draining.done()
    engine.go_on.set()
    assert [reply async for reply in late]
    await draining
    assert now_s() - began_s == pytest.approx(5.4)


def settings(folder: Path, **changes: Any) -> WorkerSettings:
    wires = Wires(discovery_backend="file", request_plane="tcp", file_registry=folder / "registry")
    fields: dict[str, Any] = {"model_path": folder, "wires": wires} | changes
    return WorkerSettings(**fields)


@dataclasses.dataclass
class Life:
    """A running worker, and what the registry shows."""

    chosen: WorkerSettings
    shutdown: asyncio.Event
    task: asyncio.Task[int]
    snapshots: AsyncGenerator[Snapshot, None]

    async def shows(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """The next fleet that meets the condition."""
        async with asyncio.timeout(PATIENCE_S):
            async for fleet in self.snapshots:
                if condition(fleet):
                    return fleet
        raise AssertionError("the watch ended")

    async def ready(self) -> WorkerInfo:
        return (await self.shows(lambda fleet: [worker.is_ready for worker in fleet] == [True]))[0]


@asynccontextmanager
async def living(chosen: WorkerSettings, engine: ScriptedEngine, status: int = 0) -> AsyncIterator[Life]:
    """A worker, which is stopped at the end and leaves with this exit status."""
    shutdown = asyncio.Event()
    task = asyncio.create_task(run_worker(chosen, engine, shutdown))
    async with aclosing(chosen.wires.discovery().watch()) as snapshots:
        yield Life(chosen, shutdown, task, snapshots)
        shutdown.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await task == status
    assert engine.stopped


@pytest.mark.parametrize("kind", [OSError, ValueError, ImportError, RuntimeError])
async def test_an_engine_that_does_not_start_is_an_error_not_a_traceback(
    tmp_path: Path, kind: type[Exception]
) -> None:
    async with living(settings(tmp_path), ScriptedEngine(kind("no weights")), status=1) as life:
        await life.task


@pytest.mark.parametrize("is_readable", [True, False])
async def test_a_worker_shows_its_engines_facts(tmp_path: Path, is_readable: bool) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x01") if is_readable else weights.mkdir()
    chosen = settings(tmp_path, model_path=tmp_path / "registry" / "..")
    async with living(chosen, ScriptedEngine(kv_transfer="tcp")) as life:
        shown = await life.ready()
    assert shown.model_path == str(tmp_path.resolve())
    assert (shown.max_batch_size, shown.max_queue_size) == (3, 5)
    assert (shown.worker_id, shown.role) == (f"agg-{shown.incarnation[:8]}", Role.DECODE)
    assert (shown.engine, shown.engine_version, shown.kv_transfer) == ("scripted", "1", "tcp")
    assert (shown.context_length, shown.kv_layout, shown.cold_peers) == (10, LAYOUT, ())
    assert shown.checkpoint == (fingerprint(tmp_path) if is_readable else "")


async def test_a_ready_worker_keeps_its_file_fresh(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    async with living(settings(tmp_path, ready_file=ready), ScriptedEngine()):
        await until(ready.exists)
        os.utime(ready, (0, 0))
        await until(lambda: ready.stat().st_mtime > 0)
    assert not ready.exists()


async def test_a_pair_that_does_not_warm_up_is_named(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    peer = msgspec.structs.replace(
        worker("gone"), model=chosen.model, address="tcp://127.0.0.1:1/gone", engine="scripted",
        engine_version="1", kv_layout=LAYOUT, kv_transfer="tcp",
    )  # fmt: skip
    async with (
        chosen.wires.discovery().register(peer),
        living(chosen, ScriptedEngine(kv_transfer="tcp")) as life,
    ):
        fleet = await life.shows(lambda fleet: len(fleet) == 2 and all(w.is_ready for w in fleet))
        assert [w.cold_peers for w in fleet if w.worker_id != "gone"] == [("gone",)]


class Noting:
    """A discovery or transport that records what it shows and that it was closed, or never answers."""

    def __init__(self, inner: Any, noted: list[str], *, is_mute: bool) -> None:
        self._inner = inner
        self._noted = noted
        self._is_mute = is_mute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    is_reachable = False

    async def watch(self) -> AsyncGenerator[tuple[WorkerInfo, ...], None]:
        if self._is_mute:
            await asyncio.Event().wait()
        async with aclosing(self._inner.watch()) as snapshots:
            async for snapshot in snapshots:
                yield snapshot

    async def reachable(self) -> None:
        if self._is_mute:
            await asyncio.Event().wait()

    @asynccontextmanager
    async def register(self, info: WorkerInfo) -> AsyncIterator[None]:
        self._noted.append("ready" if info.is_ready else "warming")
        async with self._inner.register(info):
            yield

    async def close(self) -> None:
        self._noted.append(type(self._inner).__name__)
        await self._inner.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotingWires(Wires):
    noted: list[str]
    mute: str = ""

    def discovery(self) -> Any:
        return Noting(super().discovery(), self.noted, is_mute=self.mute == "registry")

    def transport(self) -> Any:
        return Noting(super().transport(), self.noted, is_mute=self.mute == "plane")


def noting(folder: Path, noted: list[str], mute: str = "") -> WorkerSettings:
    wires = NotingWires(**vars(settings(folder).wires), noted=noted, mute=mute)
    return settings(folder, wires=wires)


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_worker_that_ends_lets_go_of_its_connections(tmp_path: Path, is_broken: bool) -> None:
    noted: list[str] = []
    engine, shutdown = ScriptedEngine(), asyncio.Event()
    engine.broken.set() if is_broken else shutdown.set()
    await run_worker(noting(tmp_path, noted), engine, shutdown)

    # Once before the engine loads, and once after it has failed.
    assert noted.count("FilesDiscovery") == noted.count("TcpTransport") == 1 + is_broken
    assert ("warming" in noted) == is_broken, "one that was stopped before is never shown"


@pytest.mark.parametrize("mute", ["registry", "plane"])
@jumping
async def test_a_worker_waits_for_what_it_needs_for_a_minute_or_until_it_is_stopped(
    tmp_path: Path, mute: str
) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    unloaded = ValueError("it loads later")
    chosen, engines = noting(tmp_path, [], mute), (ScriptedEngine(unloaded), ScriptedEngine(unloaded))
    leaving = asyncio.create_task(run_worker(chosen, engines[0], stopped))
    await asyncio.sleep(30)
    assert not leaving.done()
    stopped.set()
    assert await leaving == 0
    began_s = loop.time()
    with pytest.raises(NotStarted):
        await run_worker(chosen, engines[1], asyncio.Event())
    assert loop.time() - began_s == pytest.approx(60, abs=2)
    assert [engine.stopped for engine in engines] == [True, True]


@pytest.mark.parametrize(("is_broken", "status", "lasts_s"), [(False, 0, 7.5), (True, 1, 0)])
@jumping
async def test_answers_have_the_drain_timeout_to_end_but_not_those_of_a_broken_engine(
    tmp_path: Path, is_broken: bool, status: int, lasts_s: float
) -> None:
    engine, loop = ScriptedEngine(), asyncio.get_running_loop()
    async with living(settings(tmp_path, drain_timeout_s=7.0), engine, status) as life:
        caller, shown = life.chosen.wires.transport(), await life.ready()
        patient = msgspec.structs.replace(REQUEST, deadline_s=60)
        async with aclosing(caller.call(shown.address, patient)) as replies:
            await anext(replies)
            engine.broken.set() if is_broken else life.shutdown.set()
            began_s = loop.time()
            await life.task
            assert loop.time() - began_s == pytest.approx(lasts_s, abs=3)
            with pytest.raises(WorkerLost):
                await anext(replies)
        await caller.close()


async def test_a_shutdown_that_is_asked_for_while_the_engine_starts_ends_it(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        async def start(self) -> EngineInfo:
            await asyncio.Event().wait()
            raise AssertionError

    async with living(settings(tmp_path), Slow()):
        await asyncio.sleep(0)  # the engine starts now


async def test_a_worker_is_ready_when_its_pairs_are_warm_and_of_two_at_once_none_is_missed(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine(kv_transfer="tcp")
    prefill = settings(tmp_path, disaggregation_mode="prefill")
    async with living(settings(tmp_path), engine) as life, living(prefill, ScriptedEngine(kv_transfer="tcp")):
        fleet = await life.shows(lambda fleet: len(fleet) == 2)
        assert not all(worker.is_ready for worker in fleet)  # the later one has seen the other
        engine.go_on.set()
        await life.shows(lambda fleet: [worker.is_ready for worker in fleet] == [True, True])
    assert engine.num_closed >= 1
