"""The cache transceiver: its two ends call each other over TCP, the bytes have a road of their own.

    puller                         source
    KvAsk(offer, secret)     ->
                             <-    KvGrant, or HandoffFailed
    the bytes, in it, by its socket or over UCX; a KvWithdrawn or the call's end stops the puller
    it closes the call       ->
    KvConfirm(offer, secret) ->
                             <-    the end, or HandoffFailed

The confirmation makes withdrawal safe: bytes read from memory that was withdrawn meanwhile are discarded."""

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from baton.errors import BatonError, HandoffFailed, HandoffStalled, WorkerLost
from baton.messages import UNDECODABLE, KvAsk, KvConfirm, KvGrant, KvWithdrawn, Reply, Request
from baton.peer_tls import CERT, PeerTls
from baton.tcp import TcpTransport
from baton.telemetry import unauthenticated
from workers.kv.memory import Memory, NoDirectPath
from workers.kv.stream import STALL_S, Stream

log = logging.getLogger(__name__)

GONE = "the KV is no longer offered: it was pulled or withdrawn, or it expired"
_SECRET_BYTES = 16


class Ticket(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a puller needs to fetch one offer: its source's address, id, size and secret.

    `wire` is the transceiver's kind (`ucx`, `tcp`), which both sides must share. Only a holder of the ticket
    can read the bytes."""

    wire: str
    offer_id: int
    num_bytes: int
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
        if not self.moved.done():
            self.moved.set_result(num_bytes)


if TYPE_CHECKING:  # it imports NIXL
    from workers.kv.direct import Direct

Fetch = Callable[[str, KvGrant, Memory], Coroutine[None, None, None]]
"""Fills the memory from an address by its grant; after it returns or raises, it writes nothing."""
_MAX_REMEMBERED = 256


class CacheTransceiver:
    """Moves one request's KV, gathered into contiguous bytes, between two worker processes: over `direct` if
    there is one and it reaches the source, else streamed. Contract: `tests/contract/test_transceiver.py`.

    * A pull that returns has delivered the offered bytes: after the last byte the source confirms that the
      offer still stood.
    * Every wait ends: a dead peer is HandoffFailed at once, one that sends nothing is HandoffStalled after
      STALL_S.
    * After a failed pull the offer remains; it can be pulled again until it has moved or is withdrawn.
    * All methods are called on one event loop; bytes move off it. CUDA work on the memory must be finished
      (synchronized) before `offer` and `pull`; pulled bytes are visible to every stream.

    `transport_name` is the kind: `ucx`, `tcp`, `tcp+tls`. Without `moves_device_memory`, CUDA memory must be
    staged on the host."""

    def __init__(self, host: str, tls: PeerTls | None = None, direct: "Direct | None" = None) -> None:
        """`host`: the address to listen on and to announce to pullers."""
        self._host = host
        self._direct = direct
        self.transport_name = "ucx" if direct is not None else "tcp" if tls is None else "tcp+tls"
        self.moves_device_memory = direct is not None
        self._stream = Stream(host, tls)
        self._offers: dict[int, _Offer] = {}
        self._offer_ids = itertools.count(1)
        self._transport = TcpTransport(host=host, liveness_s=STALL_S, tls=tls)
        if direct is not None:
            direct.has_link = self._transport.has_link
        self._open = AsyncExitStack()
        self._address: str | None = None
        self._no_path: set[str] = set()

    async def start(self) -> None:
        """Start; raises OSError or ImportError with the reason if this machine cannot run it."""
        async with AsyncExitStack() as opening:
            if self._direct is not None:
                await opening.enter_async_context(self._direct.running())
            opening.push_async_callback(self._transport.close)
            served = self._transport.serve(f"kv-{self._host}", self._answer)
            self._address = await opening.enter_async_context(served)
            self._open = opening.pop_all()

    def offer(self, payload: Memory) -> Ticket:
        """Make `payload`, at least a byte, readable to one peer; it must not change until the offer ends."""
        if self._address is None:
            raise HandoffFailed("the transceiver is closed")
        offer_id, offer = next(self._offer_ids), _Offer(payload)
        self._offers[offer_id] = offer
        return Ticket(
            wire=self.transport_name,
            offer_id=offer_id,
            num_bytes=payload.num_bytes,
            address=self._address,
            secret=offer.secret,
        )

    async def moved(self, ticket: Ticket) -> int:
        """Wait until a peer has pulled what it wanted of the offer; returns how many bytes that were. Raises
        HandoffFailed if it was withdrawn before."""
        offer = self._offers.get(ticket.offer_id)
        num_bytes = await asyncio.shield(offer.moved) if offer is not None else 0
        if not num_bytes:
            raise HandoffFailed("the offer was withdrawn before it was pulled")
        return num_bytes

    def withdraw(self, ticket: Ticket) -> None:
        """End the offer, pulled or not; idempotent. Later pulls fail, so the memory may be overwritten at
        once; its `owner` is released when active readers have ended, over UCX when the transceiver closes."""
        if offer := self._offers.pop(ticket.offer_id, None):
            offer.end(0)

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """Fetch the last `into.num_bytes` of an offer. Raises HandoffFailed, after which `into` is not
        written any more."""
        if ticket.wire != self.transport_name:
            raise HandoffFailed(
                f"the KV is offered over {ticket.wire}, this worker uses {self.transport_name}"
            )
        if self._address is None:
            raise HandoffFailed("the transceiver is closed")
        try:
            async with asyncio.timeout(deadline_s):
                await self._pull(ticket, into)
        except TimeoutError:
            raise HandoffFailed(f"the KV did not arrive within {deadline_s:g} s") from None

    async def close(self) -> None:
        """Withdraw every offer, fail every pull with HandoffFailed, stop."""
        self._address = None
        for offer in self._offers.values():
            offer.end(0)
        self._offers.clear()
        await self._open.aclose()

    async def _answer(self, request: Request) -> AsyncGenerator[Reply, None]:
        """The replies to a reader. Raises HandoffFailed if the offer does not stand."""
        if not isinstance(request, KvAsk | KvConfirm):
            raise HandoffFailed("this is the address of a worker's KV; its requests go to its own")
        offer = self._standing(request)
        if isinstance(request, KvConfirm):
            offer.end(request.num_bytes)
            return
        payload, num_bytes = offer.payload, request.num_bytes
        offer.num_readers += 1
        try:
            part = payload.part(payload.num_bytes - num_bytes, num_bytes)
            async with self._lend(part, request.is_direct) as grant:
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
        num_offered = offer.payload.num_bytes
        if not 1 <= request.num_bytes <= num_offered:
            raise HandoffFailed(f"{request.num_bytes} bytes were requested; {num_offered} are offered")
        return offer

    def _lend(self, payload: Memory, is_direct: bool) -> AbstractAsyncContextManager[KvGrant]:
        if is_direct and self._direct is not None:
            return self._direct.lend(payload)
        if is_direct or payload.device_index is not None:
            raise HandoffFailed(f"this memory cannot be read over {self.transport_name} that way")
        return self._stream.lend(payload)

    async def _pull(self, ticket: Ticket, into: Memory) -> None:
        try:
            ask = KvAsk(ticket.offer_id, ticket.secret, into.num_bytes)
            if not await self._read(ticket.address, ask, into):
                await self._fetch(ticket.address, ask, self._stream.fetch, into)
        except HandoffFailed:
            raise
        except (BatonError, OSError, ValueError, *UNDECODABLE) as error:
            is_silent = isinstance(error, WorkerLost) and error.is_silent
            failed = HandoffStalled if is_silent else HandoffFailed
            raise failed(f"the source of the KV was lost: {error}") from error

    async def _read(self, address: str, ask: KvAsk, into: Memory) -> bool:
        """Read the source's memory directly; False if that is not possible."""
        if self._direct is None or (address in self._no_path and into.device_index is None):
            return False
        ask = msgspec.structs.replace(ask, is_direct=True)
        try:
            await self._fetch(address, ask, self._direct.fetch, into)
        except NoDirectPath as error:
            if into.device_index is not None:
                raise HandoffFailed(f"no direct path from the source to this CUDA device: {error}") from error
            log.warning("kv streamed peer=%s reason=no direct path: %s", urlsplit(address).netloc, error)
            if len(self._no_path) >= _MAX_REMEMBERED:
                self._no_path.clear()
            self._no_path.add(address)
            return False
        return True

    async def _fetch(self, address: str, ask: KvAsk, fetch: Fetch, into: Memory) -> None:
        async with aclosing(self._transport.call(address, ask)) as replies:
            grant = await anext(replies, None)
            if not isinstance(grant, KvGrant):
                raise HandoffFailed(f"the source answered {type(grant).__name__} instead of a grant")
            await _while_granted(fetch(address, grant, into), replies)
        async for _ in self._transport.call(address, KvConfirm(*msgspec.structs.astuple(ask))):
            pass


async def _while_granted(fetching: Coroutine[None, None, None], replies: AsyncGenerator[Reply, None]) -> None:
    """Return when the bytes are there. If the source replies or ends before, or this is cancelled, end
    when `fetching` has ended."""
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


def choose_transceiver(
    backend: str, *, host: str = "127.0.0.1", tls: PeerTls | None = None
) -> CacheTransceiver:
    """The transceiver for `backend`, not started: `UCX`, `TCP`, or `DEFAULT` (UCX if available, else TCP).
    UCX has no TLS: with `tls` the default is TCP.

    `host` is the address to listen on and to announce. Raises ImportError or OSError if UCX is requested but
    unavailable. May take a second."""
    if backend == "UCX" and tls is not None:
        raise OSError(f"it has no TLS, which {CERT} asks for")
    if backend == "TCP" or tls is not None:
        return CacheTransceiver(host, tls)
    try:
        from workers.kv.direct import Direct  # noqa: PLC0415  machines without UCX can use the rest

        return CacheTransceiver(host, direct=Direct(host))
    except (ImportError, OSError) as error:
        if backend == "UCX":
            raise
        log.warning("kv transfer=tcp reason=UCX is unavailable: %s", error)
        return CacheTransceiver(host)
