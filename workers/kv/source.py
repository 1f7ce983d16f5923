"""The source's end of a pull: a transceiver's offers, and the socket that serves them."""

import asyncio
import functools
import hmac
import itertools
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from baton.errors import HandoffFailed
from baton.listener import Admission, Listener, num_connections
from baton.peer_tls import PeerTls
from baton.strangers import strangers
from workers.kv.memory import Memory, host_view
from workers.kv.tls import accepted
from workers.kv.transceiver import Ticket
from workers.kv.wire import Ask, Connection, Fetched, Grant, Refused, Stands, notice_dead_host

log = logging.getLogger(__name__)

_SECRET_BYTES = 16
_ASK_LIMIT_S = 5.0
_MAX_SESSIONS = 256
_PLACE = "the KV socket"
_GONE = "the KV is no longer offered: it was pulled or withdrawn, or it expired"

Lend = Callable[[Connection, Memory, int], AbstractAsyncContextManager[None]]
"""Gives one puller access to the memory's last bytes: entering sends the Grant, leaving revokes access."""


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """`Ticket.peer`: the address to ask for the offer, and its secret."""

    host: str
    port: int
    secret: bytes


class _Offer:
    """One offer. `moved` becomes the number of bytes that a peer has pulled, 0 when it was withdrawn."""

    def __init__(self, payload: Memory) -> None:
        self.payload = payload
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self.moved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.readers: set[Connection] = set()

    def end(self, num_bytes: int) -> None:
        """End the offer, once; active readers see it by the end of the connection's sending half.

        The other half stays open: a reader's memory is freed after that reader hangs up.
        """
        if not self.moved.done():
            self.moved.set_result(num_bytes)
            for reader in self.readers:
                reader.shut_down(socket.SHUT_WR)


class Source:
    """Offers memory under tickets of kind `wire`, listening on `host`, which the pullers must reach.

    Every source can stream host memory; `lend_direct` serves pullers that read it directly. `on_moved` is
    called with what was pulled, and whether it was read directly.
    """

    def __init__(
        self,
        wire: str,
        host: str,
        lend_direct: Lend | None = None,
        tls: PeerTls | None = None,
        on_moved: Callable[[Memory, bool], object] = lambda payload, direct: None,  # noqa: ARG005
    ) -> None:
        self._wire = wire
        self._host = host
        self._lend_direct = lend_direct
        self._tls = tls
        self._on_moved = on_moved
        self._offers: dict[int, _Offer] = {}
        self._ids = itertools.count(1)
        self._listener: Listener | None = None
        self._sessions: Admission[Connection] = Admission(num_connections(4, _MAX_SESSIONS), _evict)
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on an ephemeral port. Raises OSError."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=_MAX_SESSIONS)
        self._port = listener.getsockname()[1]
        self._listener = Listener(listener, self._take, self._sessions.make_room)

    def offer(self, payload: Memory) -> Ticket:
        """See CacheTransceiver.offer."""
        if self._listener is None:
            raise HandoffFailed("the transceiver is closed")
        if payload.num_bytes < 1:
            raise ValueError("an offer needs at least one byte")
        offer = _Offer(payload)
        offer_id = next(self._ids)
        self._offers[offer_id] = offer
        peer = msgspec.msgpack.encode(Peer(self._host, self._port, offer.secret))
        return Ticket(wire=self._wire, offer_id=offer_id, num_bytes=payload.num_bytes, peer=peer)

    async def moved(self, ticket: Ticket) -> int:
        """See CacheTransceiver.moved."""
        offer = self._offers.get(ticket.offer_id)
        num_bytes = await asyncio.shield(offer.moved) if offer is not None else 0
        if not num_bytes:
            raise HandoffFailed("the offer was withdrawn before it was pulled")
        return num_bytes

    def withdraw(self, ticket: Ticket) -> None:
        """See CacheTransceiver.withdraw."""
        if offer := self._offers.pop(ticket.offer_id, None):
            offer.end(0)

    async def close(self) -> None:
        """Withdraw every offer and close every puller's connection."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        for offer in self._offers.values():
            offer.end(0)
        self._offers.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, sock: socket.socket) -> None:
        try:
            connection = accepted(sock, self._tls)
        except OSError as error:  # it hung up before the TLS handshake
            log.info("puller lost wire=%s reason=%s", self._wire, error)
            return
        if not self._sessions.enter(connection):
            log.warning("puller refused wire=%s sessions=%d", self._wire, len(self._tasks))
            connection.close()
            return
        task = asyncio.create_task(self._session(connection))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, connection))

    def _ended(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._sessions.leave(connection)

    async def _session(self, connection: Connection) -> None:
        """Serve one puller until it hangs up."""
        with connection.sock as sock:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                notice_dead_host(sock, idle_s=15, every_s=5, num_probes=3)
                async with asyncio.timeout(_ASK_LIMIT_S):
                    ask = await _first_ask(connection)
                while ask is not None and await self._answer(connection, ask):
                    self._sessions.wait(connection)
                    ask = await _next_ask(connection)
            except (OSError, HandoffFailed, TimeoutError) as error:
                log.info("puller lost wire=%s reason=%s", self._wire, error)

    async def _answer(self, connection: Connection, ask: Ask) -> bool:
        """Serve one Ask; False if it was not pulled."""
        try:
            offer, lend = self._granted(ask)
        except HandoffFailed as refusal:
            await connection.send(Refused(refusal.message))
            return False
        self._sessions.busy(connection)
        offer.readers.add(connection)
        try:
            async with lend(connection, offer.payload, ask.num_bytes):
                await connection.receive(Fetched)
        finally:
            offer.readers.discard(connection)
        if ask.direct and not connection.is_quiet():
            return False  # it gave up meanwhile, and did not get it
        offer.end(ask.num_bytes)
        self._on_moved(offer.payload, ask.direct)
        if ask.direct:
            await connection.send(Stands())  # fails if the offer ended before
        return True

    def _granted(self, ask: Ask) -> tuple[_Offer, Lend]:
        """The offer that was asked for, and how to serve it. Raises HandoffFailed."""
        offer = self._offers.get(ask.offer_id)
        is_known = offer is not None and hmac.compare_digest(offer.secret, ask.secret)
        if offer is not None and not is_known:
            strangers.note(_PLACE)
        if offer is None or not is_known or offer.moved.done():
            raise HandoffFailed(_GONE)
        num_offered = offer.payload.num_bytes
        if not 1 <= ask.num_bytes <= num_offered:
            raise HandoffFailed(f"{ask.num_bytes} bytes were asked for; {num_offered} are offered")
        lend = self._lend_direct if ask.direct else _stream
        if lend is None or (lend is _stream and offer.payload.device_index is not None):
            raise HandoffFailed(f"this memory cannot be read over {self._wire} that way")
        return offer, lend


@asynccontextmanager
async def _stream(connection: Connection, payload: Memory, num_bytes: int) -> AsyncIterator[None]:
    await connection.send_between(Grant(), host_view(payload)[-num_bytes:], Stands())
    yield


async def _first_ask(connection: Connection) -> Ask | None:
    """The first message must be an Ask, after the TLS handshake if there is one. Raises OSError."""
    try:
        await connection.open()
        return await connection.receive(Ask)
    except ConnectionResetError:
        raise
    except ConnectionError as error:
        strangers.note(f"{_PLACE}: {error}")
        raise


async def _next_ask(connection: Connection) -> Ask | None:
    """The puller's next Ask, or None when it closes the connection."""
    try:
        return await connection.receive(Ask)
    except ConnectionResetError:
        return None


def _evict(connection: Connection) -> None:
    """Wake its session, which then ends."""
    connection.shut_down(socket.SHUT_RDWR)
