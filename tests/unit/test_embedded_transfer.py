"""KV that arrives after its request has ended is not stored, and decoding does not continue."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from baton.errors import DeadlineExceeded
from tests.embedded import started
from tests.engine_calls import ask, handed_over, tokens
from tests.memory_wire import Wire
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.pool import Staging
from workers.engines.embedded.scheduler import Phase
from workers.engines.embedded.steps import Call, StepLoop


class Pulling(NamedTuple):
    """The decode end of a handoff whose pull is held."""

    engine: EmbeddedEngine
    steps: StepLoop
    call: Call
    answer: "asyncio.Task[list[int]]"

    def stored(self) -> torch.Tensor:
        """The pool's contents in the call's blocks."""
        pool, lease = self.steps.runner.pool, self.call.sequence.lease
        return torch.stack(list(pool.read(0, torch.tensor(lease.blocks), 1))).clone()


def steps_of(engine: EmbeddedEngine) -> StepLoop:
    steps = engine._steps  # noqa: SLF001  no public method shows it
    assert steps is not None
    return steps


def call_of(engine: EmbeddedEngine) -> Call:
    (call,) = steps_of(engine)._calls.values()  # noqa: SLF001  no public method shows it
    return call


@contextlib.asynccontextmanager
async def pulling(checkpoint: Path, wire: Wire) -> AsyncIterator[Pulling]:
    wire.hold.clear()
    async with (
        started(checkpoint, wire) as decode,
        started(checkpoint, wire) as prefill,
        handed_over(prefill, ask()) as handoff,
    ):
        answer = asyncio.create_task(tokens(decode.decode(ask(handoff=handoff))))
        await until(lambda: wire.num_pulls == 1)
        yield Pulling(decode, steps_of(decode), call_of(decode), answer)
        with pytest.raises(DeadlineExceeded):
            await answer


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(1, 1 << 16), (1 << 16, 1 << 16), ((1 << 16) + 1, 1 << 17), (1 << 20, 1 << 20)]
)
def test_a_staging_buffer_has_the_next_power_of_two_and_is_used_again(num_bytes: int, size: int) -> None:
    staging = Staging(torch.device("cpu"), on_device=True)
    buffer = staging.take(num_bytes)
    assert buffer.whole is not None
    assert (buffer.whole.num_bytes, buffer.num_bytes) == (size, num_bytes)
    staging.give_back(buffer)
    assert staging.take(size).whole is buffer.whole
    assert staging.take(size).whole is not buffer.whole, "two are never in the same memory"


async def test_kv_that_comes_too_late_is_not_stored(checkpoint: Path) -> None:
    wire = Wire()
    async with pulling(checkpoint, wire) as here:
        before = here.stored()
        here.steps.fail(here.call, DeadlineExceeded("over"))  # its blocks may get a new owner
        wire.hold.set()
        await asyncio.wait({here.answer})
        assert torch.equal(here.stored(), before)


async def test_a_call_that_ended_while_its_kv_was_stored_does_not_go_on(checkpoint: Path) -> None:
    wire, go_on = Wire(), threading.Event()
    async with pulling(checkpoint, wire) as here:
        blocking = asyncio.create_task(here.steps.on_thread(go_on.wait, PATIENCE_S))
        wire.hold.set()
        await until(wire.all_moved)
        for _ in range(10):
            await asyncio.sleep(0)  # turns in which it asks the thread to store the KV
        here.steps.fail(here.call, DeadlineExceeded("over"))
        go_on.set()
        await asyncio.wait({here.answer, blocking})
        assert here.engine.stats().num_handoffs == 0
        assert here.call.outbox.empty()


@pytest.mark.parametrize("ends", [DeadlineExceeded, asyncio.CancelledError])
async def test_kv_that_is_gathered_after_its_request_has_ended_is_not_offered_and_its_buffer_is_free(
    checkpoint: Path, ends: type[BaseException]
) -> None:
    run, gather = threading.Event(), threading.Event()
    async with started(checkpoint, Wire()) as prefill:
        steps = steps_of(prefill)
        before_the_step = asyncio.create_task(steps.on_thread(run.wait, PATIENCE_S))
        handing = asyncio.create_task(anext(prefill.prefill(ask())))
        await until(lambda: prefill.stats().num_running == 1)  # its step is in the thread's queue
        after_the_step = asyncio.create_task(steps.on_thread(gather.wait, PATIENCE_S))
        await asyncio.sleep(0)  # it is in the queue
        run.set()
        call = call_of(prefill)
        await until(lambda: call.sequence.phase is Phase.PINNED)
        for _ in range(10):
            await asyncio.sleep(0)  # turns in which it asks the thread to gather the KV
        if ends is DeadlineExceeded:
            steps.fail(call, DeadlineExceeded("over"))
        else:
            handing.cancel()
            await asyncio.wait({handing})
        gather.set()
        await asyncio.gather(before_the_step, after_the_step)
        with pytest.raises(ends):
            await handing
        assert (prefill.stats().num_handoffs, prefill.stats().num_handoffs_expired) == (0, 0)
        free = steps.runner.staging._free  # noqa: SLF001  no public method shows it
        await until(lambda: [len(buffers) for buffers in free.values()] == [1])
