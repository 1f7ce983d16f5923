"""The cache transceiver: its two ends call each other over TCP, the bytes have a socket of their own.

    puller                         source
    KvAsk(offer, secret)     ->
                             <-    KvGrant, or HandoffFailed
    the bytes, in it or by its socket; a KvWithdrawn or the call's end stops the puller
    it closes the call       ->
    KvConfirm(offer, secret) ->
                             <-    the end, or HandoffFailed

The confirmation makes withdrawal safe: bytes read from memory that was withdrawn meanwhile are discarded.
"""

import asyncio
import hmac
import itertools
import secrets
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing, suppress
from urllib.parse import urlsplit

import msgspec

from baton.errors import BatonError, HandoffFailed, HandoffStalled, WorkerLost
from baton.messages import UNDECODABLE, KvAsk, KvConfirm, KvGrant, KvWithdrawn, Reply, Request
from baton.peer_tls import PeerTls
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from workers.kv.stream import STALL_S, Stream

GONE = "the KV is no longer offered: it was pulled or withdrawn, or it expired"
_SECRET_BYTES = 16


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a puller needs to fetch one offer: its source's address, id, size and secret.

    `wire` is the transceiver's kind (`tcp`, `tcp+tls`), which both sides must share. Only a holder of the
    ticket can read the bytes.
    """

    wire: str
    offer_id: int
    num_bytes: int
    address: str
    secret: bytes


class _Offer:
    """One offer. `moved` becomes the number of bytes that a peer has pulled, 0 when it was withdrawn."""

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.moved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.num_readers = 0

    def end(self, num_bytes: int) -> None:
        if not self.moved.done():
            self.moved.set_result(num_bytes)


class CacheTransceiver:
    """Moves one request's KV, gathered into contiguous bytes on the host, between two worker processes.
    Contract: `tests/contract/test_transceiver.py`.

    * A pull that returns has delivered the offered bytes: after the last byte the source confirms that the
      offer still stood.
    * Every wait ends: a dead peer is HandoffFailed at once, one that sends nothing is HandoffStalled after
      STALL_S.
    * After a failed pull the offer remains; it can be pulled again until it has moved or is withdrawn.
    * All methods are called on one event loop. CUDA work on the memory must be finished (synchronized)
      before `offer` and `pull`.

    `transport_name` is the kind: `tcp`, `tcp+tls`.
    """

    def __init__(self, host: str, tls: PeerTls | None = None) -> None:
        """`host`: the address to listen on and to announce to pullers."""
        self._host = host
        self.transport_name = "tcp" if tls is None else "tcp+tls"
        self._stream = Stream(host, tls)
        self._offers: dict[int, _Offer] = {}
        self._offer_ids = itertools.count(1)
        self._transport = TcpTransport(host=host, liveness_s=STALL_S, tls=tls)
        self._open = AsyncExitStack()
        self._address: str | None = None
        self._pulls: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError if `host` is not local."""
        async with AsyncExitStack() as opening:
            opening.push_async_callback(self._transport.close)
            served = self._transport.serve(f"kv-{self._host}", self._answer)
            self._address = await opening.enter_async_context(served)
            self._open = opening.pop_all()

    def offer(self, payload: memoryview) -> Ticket:
        """Make `payload`, at least one byte, readable to one peer; it must not change before it ends."""
        if self._address is None:
            raise HandoffFailed("the transceiver is closed")
        if payload.nbytes < 1:
            raise ValueError("an offer needs at least one byte")
        offer_id, offer = next(self._offer_ids), _Offer(payload)
        self._offers[offer_id] = offer
        return Ticket(
            wire=self.transport_name,
            offer_id=offer_id,
            num_bytes=payload.nbytes,
            address=self._address,
            secret=offer.secret,
        )

    async def moved(self, ticket: Ticket) -> int:
        """Wait until a peer has pulled what it wanted of the offer; returns how many bytes that were. Raises
        HandoffFailed if it was withdrawn before.
        """
        offer = self._offers.get(ticket.offer_id)
        num_bytes = await asyncio.shield(offer.moved) if offer is not None else 0
        if not num_bytes:
            raise HandoffFailed("the offer was withdrawn before it was pulled")
        return num_bytes

    def withdraw(self, ticket: Ticket) -> None:
        """End the offer, pulled or not; idempotent. Later pulls fail, so the memory may be overwritten at
        once; it is released when active readers have ended.
        """
        if offer := self._offers.pop(ticket.offer_id, None):
            offer.end(0)

    async def pull(self, ticket: Ticket, into: memoryview, deadline_s: float) -> None:
        """Fetch the last `into.nbytes` of an offer. Raises HandoffFailed, after which `into` is not written
        any more.
        """
        if ticket.wire != self.transport_name:
            raise HandoffFailed(
                f"the KV is offered over {ticket.wire}, this worker uses {self.transport_name}"
            )
        if not 1 <= into.nbytes <= ticket.num_bytes:
            raise ValueError(f"{ticket.num_bytes} bytes are offered, but the target has {into.nbytes}")
        if self._address is None:
            raise HandoffFailed("the transceiver is closed")
        task = asyncio.ensure_future(self._pull(ticket, into))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        try:
            async with asyncio.timeout(deadline_s):
                await task
        except TimeoutError:
            raise HandoffFailed(f"the KV did not arrive within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise HandoffFailed("the transceiver was closed during the pull") from None

    async def close(self) -> None:
        """Withdraw every offer, fail every pull with HandoffFailed, stop."""
        self._address = None
        for offer in self._offers.values():
            offer.end(0)
        self._offers.clear()
        for task in self._pulls:
            task.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self._open.aclose()

    async def _answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        """The replies to a reader. Raises HandoffFailed if the offer does not stand."""
        if not isinstance(request, KvAsk | KvConfirm):
            raise HandoffFailed("this is the address of a worker's KV; its requests go to its own")
        offer = self._standing(request)
        if isinstance(request, KvConfirm):
            offer.end(request.num_bytes)
            return
        offer.num_readers += 1
        try:
            async with self._stream.lend(offer.payload[-request.num_bytes :]) as grant:
                yield grant
                await asyncio.wait({offer.moved})
                yield KvWithdrawn()
                await asyncio.Event().wait()  # its memory is kept until the reader closes the call
        finally:
            offer.num_readers -= 1

    def _standing(self, request: KvAsk | KvConfirm) -> _Offer:
        offer = self._offers.get(request.offer_id)
        if offer is not None and not hmac.compare_digest(offer.secret, request.secret):
            unauthenticated.note("the KV's address")
            offer = None
        if offer is None or offer.moved.done():
            raise HandoffFailed(GONE)
        num_offered = offer.payload.nbytes
        if not 1 <= request.num_bytes <= num_offered:
            raise HandoffFailed(f"{request.num_bytes} bytes were requested; {num_offered} are offered")
        return offer

    async def _pull(self, ticket: Ticket, into: memoryview) -> None:
        try:
            await self._fetch(ticket.address, KvAsk(ticket.offer_id, ticket.secret, into.nbytes), into)
        except HandoffFailed:
            raise
        except WorkerLost as error:
            raise (HandoffStalled if error.is_silent else HandoffFailed)(_lost(error)) from error
        except (BatonError, OSError, ValueError, *UNDECODABLE) as error:
            raise HandoffFailed(_lost(error)) from error

    async def _fetch(self, address: str, ask: KvAsk, into: memoryview) -> None:
        async with aclosing(self._transport.call(address, ask)) as replies:
            grant = await anext(replies)
            if not isinstance(grant, KvGrant):
                raise HandoffFailed(f"the source answered {type(grant).__name__} instead of a grant")
            fetching = self._stream.fetch(urlsplit(address).hostname or "", grant, into)
            await _while_granted(fetching, replies)
        async for _ in self._transport.call(address, KvConfirm(*msgspec.structs.astuple(ask))):
            pass


async def _while_granted(fetching: Coroutine[None, None, None], replies: AsyncGenerator[Reply, None]) -> None:
    """Return when the bytes are there. If the source replies or ends before, or this is cancelled, end
    when `fetching` has ended.
    """
    fetched = asyncio.ensure_future(fetching)
    ended = asyncio.ensure_future(anext(replies, None))
    try:
        await asyncio.wait({fetched, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not fetched.done():
            ended.result()
            raise HandoffFailed(GONE)
        fetched.result()
    finally:
        fetched.cancel()
        ended.cancel()
        while not (fetched.done() and ended.done()):
            with suppress(asyncio.CancelledError):  # cancelled again: the bytes still have a target
                await asyncio.wait({fetched, ended})
        for task in (fetched, ended):
            task.cancelled() or task.exception()  # retrieved


def _lost(error: Exception) -> str:
    return f"the source of the KV was lost: {error}"
