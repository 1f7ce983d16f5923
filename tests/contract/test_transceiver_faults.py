"""CacheTransceiver when a peer freezes or dies, when it is closed, and over many rounds."""

import asyncio
import os
import signal
import threading

import pytest

from baton.errors import HandoffFailed
from tests.kv_peer import LARGE_BYTES, WIRES, Command, Far, failure, near, pattern, readers_of, victim
from tests.waiting import FAILOVER_S, PATIENCE_S, until
from workers.kv.memory import host_memory
from workers.kv.transceiver import CacheTransceiver


async def test_a_frozen_source_costs_the_puller_its_deadline_and_never_writes_later(far: Far) -> None:
    for step in range(4):  # frozen while connecting, while the bytes move, before it confirms
        async with near(far.kind) as here:
            ticket = await far.offer(32 << 20, seed=1)
            into = bytearray(32 << 20)
            pull = asyncio.create_task(here.pull(ticket, host_memory(into), 0.3))
            await asyncio.sleep(step * 0.002)  # another moment each time
            far.signal(signal.SIGSTOP)
            try:
                await asyncio.wait({pull}, timeout=FAILOVER_S)
                if pull.done() and pull.exception() is None:
                    assert step > 0  # it had finished before the source froze
                    continue
                assert await failure(pull) < FAILOVER_S
                into[:] = b"\x55" * len(into)
            finally:
                far.signal(signal.SIGCONT)
            again = bytearray(32 << 20)
            await here.pull(ticket, host_memory(again), PATIENCE_S)  # after a failed pull the offer remains
            assert again == pattern(32 << 20, 1)
            assert into == b"\x55" * len(into)


async def test_a_frozen_puller_does_not_keep_the_source_from_its_memory(far: Far) -> None:
    async with near(far.kind) as here:
        buffer = pattern(LARGE_BYTES, 1)
        ticket = here.offer(host_memory(buffer))
        await far.begin_pull(ticket, seed=1)
        await until(lambda: readers_of(here, ticket) > 0, pause_s=0)
        far.signal(signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await here.moved(ticket)
            here.withdraw(ticket)
            buffer[:] = bytes(len(buffer))
        finally:
            far.signal(signal.SIGCONT)
        assert (await far.end_of_pull()).error
        fresh = here.offer(host_memory(pattern(4096, 9)))
        assert (await far.pull(fresh, seed=9)).intact


@pytest.mark.usefixtures("shared_authority")
@pytest.mark.parametrize("kind", WIRES)
async def test_a_killed_source_fails_the_pull_at_once_and_its_successor_is_pulled_from(kind: str) -> None:
    async with near(kind) as here:
        with victim(kind) as far:
            warm = await far.offer(4096, seed=1)
            await here.pull(warm, host_memory(bytearray(4096)), PATIENCE_S)
            ticket = await far.offer(LARGE_BYTES, seed=1)
            into = bytearray(LARGE_BYTES)
            pull = asyncio.create_task(here.pull(ticket, host_memory(into), PATIENCE_S))
            await until(lambda: into[0] != 0, pause_s=0)
            far.signal(signal.SIGKILL)
            assert await failure(pull) < FAILOVER_S
            late = asyncio.create_task(here.pull(ticket, host_memory(into), PATIENCE_S))
            assert await failure(late) < FAILOVER_S
        with victim(kind) as far:
            ticket = await far.offer(4096, seed=2)
            small = bytearray(4096)
            await here.pull(ticket, host_memory(small), PATIENCE_S)
            assert small == pattern(4096, 2)


@pytest.mark.usefixtures("shared_authority")
@pytest.mark.parametrize("kind", WIRES)
async def test_a_killed_puller_leaves_the_offer_to_the_next_one(kind: str) -> None:
    async with near(kind) as here:
        ticket = here.offer(host_memory(pattern(LARGE_BYTES, 1)))
        with victim(kind) as far:
            await far.begin_pull(ticket, seed=1)
            await until(lambda: readers_of(here, ticket) > 0, pause_s=0)
            far.signal(signal.SIGKILL)
            await until(lambda: readers_of(here, ticket) == 0, pause_s=0)
        with victim(kind) as far:
            assert (await far.pull(ticket, seed=1)).intact
        await here.moved(ticket)


async def test_closing_ends_every_wait(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = here.offer(host_memory(pattern(4096, 1)))
        moved = asyncio.create_task(here.moved(ticket))
        there = await far.offer(4096)
        far.signal(signal.SIGSTOP)
        try:
            pull = asyncio.create_task(here.pull(there, host_memory(bytearray(4096)), PATIENCE_S))
            await asyncio.sleep(0.02)  # there is no event to wait for
            async with asyncio.timeout(FAILOVER_S):
                await here.close()
                await failure(pull)
        finally:
            far.signal(signal.SIGCONT)
        with pytest.raises(HandoffFailed):
            await moved
        with pytest.raises(HandoffFailed):
            here.offer(host_memory(bytearray(1)))
        with pytest.raises(HandoffFailed):
            await here.pull(there, host_memory(bytearray(4096)), 1)


async def test_a_cancelled_pull_is_cancelled_and_the_offer_stands(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = await far.offer(32 << 20, seed=1)
        into = host_memory(bytearray(32 << 20))
        pull = asyncio.create_task(here.pull(ticket, into, PATIENCE_S))
        await asyncio.sleep(0.003)  # somewhere in the pull
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await here.pull(ticket, into, PATIENCE_S)


async def test_two_hundred_rounds_leak_neither_files_nor_threads(far: Far) -> None:
    async def rounds(here: CacheTransceiver, num: int) -> tuple[int, int, int, int]:
        for i in range(num):
            buffer = bytearray(5000)
            ticket = await far.offer(5000, seed=i)
            await here.pull(ticket, host_memory(buffer), PATIENCE_S)
            await far.ask(Command("withdraw", ticket=ticket))
            back = here.offer(host_memory(buffer))
            assert (await far.pull(back, seed=i)).intact
            here.withdraw(back)
        there = await far.ask(Command("ping"))
        num_fds = len(os.listdir("/proc/self/fd"))
        return num_fds, threading.active_count(), there.num_fds, there.num_threads

    async with near(far.kind) as here:
        before = await rounds(here, 10)
        after = await rounds(here, 200)
        # An executor adds threads up to its limit as needed; a leak adds one per round.
        assert all(now <= then + 8 for now, then in zip(after, before, strict=True)), (before, after)
