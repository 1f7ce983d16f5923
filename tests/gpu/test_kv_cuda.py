"""KV between GPUs over UCX: whole, and with a frozen or killed source. Uses two GPUs, or one twice."""

import asyncio
import signal

import pytest

from tests.kv_peer import failure, near, on_device, pattern, victim
from workers.kv.memory import Memory

pytestmark = pytest.mark.gpu
LARGE_BYTES = 1 << 30
SOON_S = 1.0


def here(num_bytes: int) -> Memory:
    """Zeros on the other GPU."""
    import torch  # noqa: PLC0415  where there are no GPUs, this file is collected only

    return on_device(bytearray(num_bytes), torch.cuda.device_count() - 1)


def content(memory: Memory) -> bytes:
    """The device's contents."""
    tensor = memory.owner
    return bytes(tensor.cpu().numpy())  # type: ignore[attr-defined]  # a tensor


async def test_device_memory_moves_whole_and_in_parts() -> None:
    with victim("ucx") as far:
        async with near("ucx") as transceiver:
            assert transceiver.moves_device_memory
            staging = here(8 << 20)
            for num_bytes in (1, 4096, (5 << 20) + 13):
                ticket = await far.offer(num_bytes, seed=num_bytes, device=0)
                await transceiver.pull(ticket, staging.part(64, num_bytes), 10)
                assert content(staging)[64 : 64 + num_bytes] == pattern(num_bytes, num_bytes)


async def test_a_frozen_source_of_device_memory_costs_the_deadline_and_the_offer_stands() -> None:
    with victim("ucx") as far:
        async with near("ucx") as transceiver:
            ticket = await far.offer(64 << 20, seed=1, device=0)
            into = here(64 << 20)
            far.signal(signal.SIGSTOP)
            pull = asyncio.create_task(transceiver.pull(ticket, into, 0.3))
            assert await failure(pull) < 0.3 + SOON_S
            far.signal(signal.SIGCONT)
            await transceiver.pull(ticket, into, 10)
            assert content(into) == pattern(64 << 20, 1)


async def test_a_killed_source_of_device_memory_fails_the_pull_at_once() -> None:
    async with near("ucx") as transceiver:
        into = here(LARGE_BYTES)
        with victim("ucx") as far:
            warm = await far.offer(4096, seed=1, device=0)
            await transceiver.pull(warm, into.part(0, 4096), 10)
            ticket = await far.offer(LARGE_BYTES, seed=1, device=0)
            pull = asyncio.create_task(transceiver.pull(ticket, into, 30))
            await asyncio.sleep(0)  # the pull has begun
            far.signal(signal.SIGKILL)
            assert await failure(pull) < SOON_S
        with victim("ucx") as far:
            ticket = await far.offer(4096, seed=2, device=0)
            await transceiver.pull(ticket, into.part(0, 4096), 10)
            assert content(into)[:4096] == pattern(4096, 2)
