"""KV that arrives after its request has ended is not stored, and decoding does not continue."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from baton.errors import DeadlineExceeded, WorkerLost
from baton.messages import GenerateRequest, Role
from tests.embedded import started
from tests.engine_calls import ask, handed_over
from tests.memory_wire import Wire
from tests.waiting import PATIENCE_S, until
from workers.engines.embedded.pool import Staging
from workers.engines.embedded.runner import Runner
from workers.engines.embedded.scheduler import Scheduler, new_sequence
from workers.engines.embedded.settings import EmbeddedSettings, KvCacheSettings
from workers.engines.embedded.steps import Call, StepLoop
from workers.engines.embedded.transfer import Transfers

SETTINGS = EmbeddedSettings(kv_cache_config=KvCacheSettings(tokens_per_block=8, max_tokens=2048))


class Pulling(NamedTuple):
    """The decode end of a handoff whose pull is held."""

    steps: StepLoop
    thread: ThreadPoolExecutor
    transfers: Transfers
    call: Call
    taking: asyncio.Task[None]

    def stored(self) -> torch.Tensor:
        """The pool's contents in the call's blocks."""
        pool, lease = self.steps.runner.pool, self.call.sequence.lease
        return torch.stack(list(pool.read(0, torch.tensor(lease.blocks), 1))).clone()


def opened(steps: StepLoop, request: GenerateRequest, *, hands_off: bool = False) -> Call:
    runner = steps.runner
    sequence = new_sequence(
        request, context_length=runner.context_length, vocab_size=runner.vocab_size, hands_off=hands_off
    )
    return steps.open(request, sequence, asyncio.get_running_loop().time() + PATIENCE_S)


@contextlib.asynccontextmanager
async def pulling(checkpoint: Path, wire: Wire) -> AsyncIterator[Pulling]:
    thread = ThreadPoolExecutor(1)
    runner = Runner(SETTINGS, checkpoint, stage_on_device=False)
    scheduler = Scheduler(SETTINGS, num_blocks=runner.pool.num_blocks, context_length=runner.context_length)
    steps = StepLoop(runner, thread, scheduler, max_calls=4)
    transfers = Transfers(steps, wire, ttl_s=PATIENCE_S)
    steps.start()
    wire.hold.clear()
    async with started(checkpoint, wire, Role.PREFILL) as prefill, handed_over(prefill, ask()) as handoff:
        request = ask(handoff=handoff)
        call = opened(steps, request)
        taking = asyncio.create_task(transfers.take_over(call, handoff))
        await until(lambda: wire.num_pulls == 1)
        yield Pulling(steps, thread, transfers, call, taking)
        await asyncio.wait({taking})
        steps.close(call)
    steps.stop(WorkerLost("stopped"))
    thread.shutdown()


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
        await asyncio.wait({here.taking})
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
        await asyncio.wait({here.taking, blocking})
        assert here.transfers.num_handoffs == 0
        assert here.call.outbox.qsize() == 1, "the error, and no token"


async def test_kv_that_is_gathered_after_its_request_has_ended_is_not_offered(checkpoint: Path) -> None:
    wire, go_on = Wire(), threading.Event()
    async with pulling(checkpoint, wire) as here:
        call = opened(here.steps, ask(), hands_off=True)
        first = await call.next_chunk()
        assert first is not None
        blocking = asyncio.create_task(here.steps.on_thread(go_on.wait, PATIENCE_S))
        handing = asyncio.create_task(anext(here.transfers.hand_over(call, first)))
        for _ in range(10):
            await asyncio.sleep(0)  # turns in which it asks the thread to gather the KV
        here.steps.fail(call, DeadlineExceeded("over"))
        go_on.set()
        await blocking
        with pytest.raises(DeadlineExceeded):
            await handing
        assert here.transfers.num_handoffs == here.transfers.num_expired == 0
        here.steps.close(call)
        wire.hold.set()
