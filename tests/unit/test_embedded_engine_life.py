"""The embedded engine from its start to its stop: what it says of itself, passes on, and leaves."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import DeadlineExceeded, NotReady, WorkerLost
from baton.messages import GenerateRequest, Guided, KvHandoff, Role, Sampling, WorkerStats
from tests.clock import jumping
from tests.memory_wire import Wire
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt, write_checkpoint
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.runner import Runner
from workers.engines.embedded.sampling import Sampled
from workers.engines.embedded.scheduler import Work
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.kv.transceiver import CacheTransceiver


class WatchedWire(Wire):
    """Records when it is started and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")
        await super().close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def engine(
    checkpoint: Path, wire: CacheTransceiver | None, role: Role = Role.DECODE, **options: Any
) -> EmbeddedEngine:
    settings = EmbeddedSettings(
        kv_cache_config=KvCacheSettings(tokens_per_block=8, max_tokens=2048), **options
    )
    return EmbeddedEngine(
        settings, model_path=checkpoint, role=role, worker_id="w", incarnation="1", transceiver=wire
    )


def ask(num_tokens: int = 40, max_tokens: int = 6) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=prompt(num_tokens),
        sampling=Sampling(max_tokens=max_tokens, seed=0, temperature=0.0),
        deadline_s=PATIENCE_S,
    )


async def answer(each: EmbeddedEngine, request: GenerateRequest) -> list[int]:
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(each.decode(request)) as chunks:
        return [token_id async for chunk in chunks for token_id in chunk.token_ids]


def around_steps(monkeypatch: pytest.MonkeyPatch, before: Callable[[list[Work]], object]) -> None:
    """Let `before` see each step, on the compute thread."""
    step = Runner.step

    def seen(self: Runner, works: list[Work]) -> list[Sampled | None]:
        before(works)
        return step(self, works)

    monkeypatch.setattr(Runner, "step", seen)


def test_a_prefill_worker_needs_a_transceiver(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="cache_transceiver_config"):
        engine(checkpoint, None, Role.PREFILL)


async def test_the_start_opens_the_wire_and_says_what_the_worker_can_do(checkpoint: Path) -> None:
    wire = WatchedWire()
    each = engine(checkpoint, wire, max_batch_size=3, max_queue_size=5)
    assert each.stats() == WorkerStats()
    info = await each.start()
    assert wire.calls == ["start"]
    assert (info.name, info.kv_transfer, info.context_length) == ("embedded", "memory", CONTEXT_LENGTH)
    assert (info.max_batch_size, info.max_queue_size) == (3, 5)
    assert info.kv_layout is not None
    assert info.kv_layout.tokens_per_block == 8
    await each.stop()


async def test_a_stop_tells_all_calls_at_once_takes_no_more_and_waits_for_the_step(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stepping, may_step = threading.Event(), threading.Event()

    def wait(_: list[Work]) -> None:
        is_stepping.set()
        may_step.wait(PATIENCE_S)

    wire = WatchedWire()
    each = engine(checkpoint, wire, max_batch_size=1)
    await each.start()
    around_steps(monkeypatch, wait)
    calls = [asyncio.create_task(answer(each, ask())) for _ in range(2)]
    await until(is_stepping.is_set)
    stopping = asyncio.create_task(each.stop())
    for call in calls:
        with pytest.raises(WorkerLost, match="stopped"):
            await call
    with pytest.raises(NotReady):
        await answer(each, ask())
    with pytest.raises(NotReady):
        each.num_lacking_tokens(ask())
    for _ in range(10):
        await asyncio.sleep(0)  # turns in which it waits for the step
    assert not stopping.done()
    assert wire.calls == ["start"]
    may_step.set()
    await stopping
    assert wire.calls == ["start", "close"]
    assert each.stats() == WorkerStats()
    assert not any(thread.name.startswith("embedded-compute") for thread in threading.enumerate())
    await each.stop()


class Compiling:
    """Takes three seconds to compile the empty form, and five minutes for others."""

    async def matcher(self, form: Guided, _: object) -> None:
        await asyncio.sleep(3 if form == Guided(leading=(), last=()) else 300)  # the clock jumps

    def close(self) -> None: ...


@pytest.mark.parametrize("is_quick", [True, False])
@jumping
async def test_the_deadline_counts_from_before_the_form_is_compiled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_quick: bool
) -> None:
    wire = Wire()
    prefill, decode = engine(checkpoint, wire, Role.PREFILL), engine(checkpoint, wire)
    await prefill.start()
    await decode.start()
    monkeypatch.setattr(decode, "_grammars", Compiling())
    form = Guided(leading=(), last=(), leads_once=not is_quick)
    async with contextlib.aclosing(prefill.prefill(ask())) as replies:
        handoff = await anext(replies)
        assert isinstance(handoff, KvHandoff)
        wire.hold.clear()  # the pull hangs
        request = msgspec.structs.replace(
            ask(), handoff=handoff, deadline_s=5, sampling=Sampling(max_tokens=6, seed=0, guided=form)
        )
        begun_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await answer(decode, request)
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(5, abs=0.5)
        assert wire.num_pulls == is_quick
    await decode.stop()
    await prefill.stop()


@pytest.mark.parametrize(("is_chunked", "prompts"), [(False, [[30], [30]]), (True, [[30, 10], [20]])])
async def test_a_step_has_no_more_tokens_than_it_may(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_chunked: bool, prompts: list[list[int]]
) -> None:
    seen: list[list[int]] = []
    each = engine(checkpoint, None, max_num_tokens=40, enable_chunked_prefill=is_chunked)
    await each.start()
    around_steps(monkeypatch, lambda works: seen.append([len(work.token_ids) for work in works]))
    await asyncio.gather(*[answer(each, ask(30, max_tokens=2)) for _ in range(2)])
    await each.stop()
    pieces = [[size for size in sizes if size > 1] for sizes in seen]
    assert [sizes for sizes in pieces if sizes] == prompts
