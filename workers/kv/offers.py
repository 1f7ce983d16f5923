"""The source's end of a pull: a transceiver's offers, and the calls of their readers."""

import asyncio
import hmac
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from baton.errors import HandoffFailed
from baton.messages import KvAsk, KvConfirm, KvGrant, KvWithdrawn, Reply, Request
from baton.telemetry import unauthenticated
from workers.kv.memory import Memory

GONE = "the KV is no longer offered: it was pulled or withdrawn, or it expired"
_SECRET_BYTES = 16

Lend = Callable[[Memory, bool], AbstractAsyncContextManager[bytes]]
"""Gives one reader access to this memory, which it reads directly or not: yields `KvGrant.way`, leaving
revokes the access. Raises HandoffFailed if it cannot be read that way.
"""


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """`Ticket.peer`: the address to call for the offer, and its secret."""

    address: str
    secret: bytes


class _Offer:
    """One offer. `moved` becomes the number of bytes that a peer has pulled, 0 when it was withdrawn."""

    def __init__(self, payload: Memory) -> None:
        self.payload = payload
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.moved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.num_readers = 0

    def end(self, num_bytes: int) -> None:
        """End the offer, once; its readers learn of it."""
        if not self.moved.done():
            self.moved.set_result(num_bytes)


class Offers:
    """What one process offers, by id."""

    def __init__(self, lend: Lend, on_moved: Callable[[Memory, bool], object]) -> None:
        """`on_moved` is called with what was read, and whether directly."""
        self._lend = lend
        self._on_moved = on_moved
        self._offers: dict[int, _Offer] = {}
        self._ids = itertools.count(1)

    def add(self, payload: Memory) -> tuple[int, bytes]:
        """A new offer's id and secret."""
        if payload.num_bytes < 1:
            raise ValueError("an offer needs at least one byte")
        offer_id, offer = next(self._ids), _Offer(payload)
        self._offers[offer_id] = offer
        return offer_id, offer.secret

    async def moved(self, offer_id: int) -> int:
        """See CacheTransceiver.moved."""
        offer = self._offers.get(offer_id)
        num_bytes = await asyncio.shield(offer.moved) if offer is not None else 0
        if not num_bytes:
            raise HandoffFailed("the offer was withdrawn before it was pulled")
        return num_bytes

    def withdraw(self, offer_id: int) -> None:
        """See CacheTransceiver.withdraw."""
        if offer := self._offers.pop(offer_id, None):
            offer.end(0)

    def close(self) -> None:
        """Withdraw every offer."""
        for offer_id in tuple(self._offers):
            self.withdraw(offer_id)

    async def answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        """The replies to a reader. Raises HandoffFailed if the offer does not stand."""
        if not isinstance(request, KvAsk | KvConfirm):
            raise HandoffFailed("this is the address of a worker's KV; its requests go to its own")
        offer = self._standing(request)
        if isinstance(request, KvConfirm):
            offer.end(request.num_bytes)
            self._on_moved(offer.payload, request.is_direct)
            return
        payload, num_bytes = offer.payload, request.num_bytes
        offer.num_readers += 1
        try:
            part = payload.part(payload.num_bytes - num_bytes, num_bytes)
            async with self._lend(part, request.is_direct) as way:
                yield KvGrant(way)
                await asyncio.wait({offer.moved})
                yield KvWithdrawn()
                await asyncio.Event().wait()  # its memory is kept until the reader closes the call
        finally:
            offer.num_readers -= 1

    def _standing(self, request: KvAsk | KvConfirm) -> _Offer:
        offer = self._offers.get(request.offer_id)
        is_known = offer is not None and hmac.compare_digest(offer.secret, request.secret)
        if offer is not None and not is_known:
            unauthenticated.note("the KV's address")
        if offer is None or not is_known or offer.moved.done():
            raise HandoffFailed(GONE)
        num_offered = offer.payload.num_bytes
        if not 1 <= request.num_bytes <= num_offered:
            raise HandoffFailed(f"{request.num_bytes} bytes were asked for; {num_offered} are offered")
        return offer
