"""The bodies of all requests together are bounded; what is refused, read or left frees its part."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from frontend.http.exchange import (
    FREE_BYTES,
    MIN_BYTES,
    Bodies,
    BodiesFull,
    ClientGone,
    Exchange,
    default_bytes,
)


class Sender:
    """A client that sends parts of a body when told, and can leave."""

    def __init__(self, bodies: Bodies) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._read(bodies))

    async def _read(self, bodies: Bodies) -> int:
        async def send(_: object) -> None:
            raise AssertionError

        exchange = Exchange({"headers": [], "query_string": b""}, self._parts.get, send)

        async def use(body: bytes) -> int:
            await self.may_end.wait()
            return len(body)

        return await bodies.use(exchange, 10 * FREE_BYTES, use)

    async def send(self, num_bytes: int, *, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": bytes(num_bytes), "more_body": more})
        await settled()

    def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def senders(num: int, bodies: Bodies) -> AsyncIterator[list[Sender]]:
    found = [Sender(bodies) for _ in range(num)]
    yield found
    for sender in found:
        sender.task.cancel()
    await asyncio.gather(*(sender.task for sender in found), return_exceptions=True)
    assert bodies.num_bytes == 0


async def test_long_bodies_share_the_memory_and_short_ones_are_always_read() -> None:
    bodies = Bodies(4 * FREE_BYTES)
    async with senders(4, bodies) as (first, second, third, short):
        await first.send(3 * FREE_BYTES)
        await second.send(3 * FREE_BYTES)
        assert bodies.num_bytes == 4 * FREE_BYTES
        await third.send(FREE_BYTES + 1)
        with pytest.raises(BodiesFull):
            await third.task
        await short.send(FREE_BYTES, more=False)
        short.may_end.set()
        assert await short.task == FREE_BYTES
        await first.send(1, more=False)
        with pytest.raises(BodiesFull):
            await first.task
        assert bodies.num_bytes == 2 * FREE_BYTES


async def test_a_body_over_the_budget_is_read_while_there_is_no_other() -> None:
    bodies = Bodies(FREE_BYTES)
    async with senders(3, bodies) as (first, second, short):
        await first.send(3 * FREE_BYTES)
        await second.send(2 * FREE_BYTES)
        with pytest.raises(BodiesFull):
            await second.task
        for sender, num_bytes in ((short, FREE_BYTES), (first, FREE_BYTES)):
            sender.may_end.set()
            await sender.send(num_bytes, more=False)
        assert [await short.task, await first.task] == [FREE_BYTES, 4 * FREE_BYTES]


async def test_a_body_counts_until_it_is_prepared_or_its_client_has_left() -> None:
    bodies = Bodies(4 * FREE_BYTES)
    async with senders(2, bodies) as (prepared, left):
        await prepared.send(2 * FREE_BYTES, more=False)
        await left.send(2 * FREE_BYTES)
        assert bodies.num_bytes == 2 * FREE_BYTES
        prepared.may_end.set()
        await prepared.task
        assert bodies.num_bytes == FREE_BYTES
        left.leave()
        with pytest.raises(ClientGone):
            await left.task
        assert bodies.num_bytes == 0


def test_by_default_they_have_a_part_of_the_memory() -> None:
    assert default_bytes() >= MIN_BYTES
