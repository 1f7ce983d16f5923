"""The CacheTransceiver contract, for each transceiver, across real processes that die and freeze."""

import asyncio
import contextlib
import functools
import socket

import msgspec
import pytest

from baton.errors import HandoffFailed
from tests.kv_peer import Command, Far, near, pattern, place_of, pulled, readers_of
from tests.waiting import FAILOVER_S, PATIENCE_S, until
from workers.kv.memory import host_memory


@pytest.mark.parametrize("num_bytes", [1, 4096, 5 << 20, 64 << 20])
async def test_bytes_arrive_as_they_were_offered(far: Far, num_bytes: int) -> None:
    async with near(far.kind) as here:
        assert await pulled(here, await far.offer(num_bytes, seed=3)) == pattern(num_bytes, 3)


@pytest.mark.parametrize("num_bytes", [1, 4095, 1 << 20, (5 << 20) - 1])
async def test_a_puller_takes_only_the_end_that_it_lacks(far: Far, num_bytes: int) -> None:
    async with near(far.kind) as here:
        ticket = await far.offer(5 << 20, seed=3)
        into = bytearray(num_bytes)
        await here.pull(ticket, host_memory(into), PATIENCE_S)
        assert into == pattern(5 << 20, 3)[-num_bytes:]
        back = here.offer(host_memory(pattern(5 << 20, 3)))
        await here.pull(back, host_memory(into), PATIENCE_S)
        assert await here.moved(back) == num_bytes


async def test_the_source_learns_that_the_bytes_have_moved(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = here.offer(host_memory(pattern(1 << 20, 5)))
        moved = asyncio.create_task(here.moved(ticket))
        answer = await far.pull(ticket, seed=5)
        assert answer.intact, answer.error
        async with asyncio.timeout(FAILOVER_S):
            await moved
        await here.moved(ticket)
        here.withdraw(ticket)
        assert (await far.pull(ticket)).error


async def test_fifty_offers_move_at_once(far: Far) -> None:
    async with near(far.kind) as here:
        tickets = [await far.offer(100_000 + i, seed=i) for i in range(50)]
        for i, there in enumerate(await asyncio.gather(*(pulled(here, ticket) for ticket in tickets))):
            assert there == pattern(100_000 + i, i)


async def test_a_staging_buffer_is_used_again_for_other_bytes_and_sizes(far: Far) -> None:
    async with near(far.kind) as here:
        buffer = bytearray(1 << 20)
        staging = host_memory(buffer)
        for seed, num_bytes in enumerate((900_000, 1000, 70_000, 1000)):
            buffer[100 : 100 + num_bytes] = pattern(num_bytes, seed)
            ticket = here.offer(staging.part(100, num_bytes))
            answer = await far.pull(ticket, seed=seed)
            assert answer.intact, answer.error
            here.withdraw(ticket)
            back = await far.offer(num_bytes, seed=seed + 50)
            await here.pull(back, staging.part(7, num_bytes), PATIENCE_S)
            assert buffer[7 : 7 + num_bytes] == pattern(num_bytes, seed + 50)


async def test_what_was_withdrawn_is_not_pulled(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = here.offer(host_memory(pattern(4096, 1)))
        moved = asyncio.create_task(here.moved(ticket))
        await asyncio.sleep(0)  # `moved` waits now
        here.withdraw(ticket)
        here.withdraw(ticket)
        with pytest.raises(HandoffFailed):
            await moved
        answer = await far.pull(ticket)
        assert answer.error
        assert answer.elapsed_s < FAILOVER_S


async def test_the_wait_for_an_unwanted_offer_can_be_cancelled(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = here.offer(host_memory(pattern(4096, 1)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await here.moved(ticket)
        assert (await far.pull(ticket, seed=1)).intact  # cancelling the wait ended nothing
        await here.moved(ticket)


async def test_overwriting_withdrawn_memory_under_a_running_pull_spoils_no_pull(far: Far) -> None:
    """At any moment of the pull: it delivers what was offered, or fails."""
    async with near(far.kind) as here:
        buffer = pattern(16 << 20, 1)
        original = bytes(buffer)
        payload = host_memory(buffer)
        num_failed = 0
        for step in range(16):
            buffer[:] = original
            ticket = here.offer(payload)
            await far.begin_pull(ticket, seed=1)
            with contextlib.suppress(TimeoutError):
                await until(functools.partial(readers_of, here, ticket), 0.02, pause_s=0)
            await asyncio.sleep(step * 0.001)  # another moment each time
            here.withdraw(ticket)
            buffer[:] = bytes(len(buffer))
            answer = await far.end_of_pull()
            assert answer.intact or answer.error
            num_failed += answer.error is not None
        assert num_failed


async def test_a_ticket_for_another_wire_or_another_size_is_refused(far: Far) -> None:
    async with near(far.kind) as here:
        ticket = await far.offer(4096)
        into = host_memory(bytearray(4096))
        with pytest.raises(HandoffFailed):
            await here.pull(msgspec.structs.replace(ticket, wire="pigeon"), into, PATIENCE_S)
        with pytest.raises(HandoffFailed):
            await here.pull(msgspec.structs.replace(ticket, address="x"), into, PATIENCE_S)
        with pytest.raises(HandoffFailed, match="4097 bytes were requested; 4096 are offered"):
            await here.pull(ticket, host_memory(bytearray(4097)), PATIENCE_S)


async def test_pinned_offers_cost_no_cpu(far: Far) -> None:
    tickets = [await far.offer(4096) for _ in range(10)]
    before = await far.ask(Command("ping"))
    await asyncio.sleep(0.5)  # the time over which CPU is measured
    after = await far.ask(Command("ping"))
    assert after.cpu_s - before.cpu_s < 0.2
    for ticket in tickets:
        await far.ask(Command("withdraw", ticket=ticket))


async def test_only_loopback_is_listened_on_by_default(far: Far) -> None:
    host, port = place_of(await far.offer(1))
    assert host == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", port)) != 0
