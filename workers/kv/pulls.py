"""The puller's end of a pull: request, deadline, and errors."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from baton.errors import HandoffFailed
from workers.kv.memory import Memory, host_view
from workers.kv.source import Peer
from workers.kv.transceiver import Ticket
from workers.kv.wire import Ask, Fetched, Grant, Stands, receive_bytes, receive_word, send_word

Fetch = Callable[[Ticket, Memory], Awaitable[None]]
"""Fetches the bytes; once it returns or raises, the memory is not written any more."""


class Pulls:
    """The running pulls of a transceiver of kind `wire`."""

    def __init__(self, wire: str, fetch: Fetch) -> None:
        self._wire = wire
        self._fetch = fetch
        self._running: set[asyncio.Future[None]] = set()
        self._closed = False

    async def pull(self, ticket: Ticket, into: Memory, deadline_s: float) -> None:
        """See CacheTransceiver.pull."""
        if ticket.wire != self._wire:
            raise HandoffFailed(f"the KV is offered over {ticket.wire}, this worker uses {self._wire}")
        if not 1 <= into.num_bytes <= ticket.num_bytes:
            raise ValueError(f"{ticket.num_bytes} bytes are offered, but the target has {into.num_bytes}")
        if self._closed:
            raise HandoffFailed("the transceiver is closed")
        task = asyncio.ensure_future(self._fetch(ticket, into))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            async with asyncio.timeout(deadline_s):
                await task
        except TimeoutError:
            raise HandoffFailed(f"the KV did not arrive within {deadline_s:g} s") from None
        except (OSError, msgspec.DecodeError) as error:
            raise HandoffFailed(f"the source of the KV was lost: {error}") from error
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise HandoffFailed("the transceiver was closed during the pull") from None

    async def close(self) -> None:
        """End every pull with HandoffFailed."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@asynccontextmanager
async def asking(
    ticket: Ticket, num_bytes: int, *, direct: bool
) -> AsyncIterator[tuple[socket.socket, Grant]]:
    """Ask for an offer's last `num_bytes`; fetch them inside the context; at its end the source confirms.

    Raises HandoffFailed if the source refuses, OSError if it is lost.
    """
    peer = msgspec.msgpack.decode(ticket.peer, type=Peer)
    family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (peer.host, peer.port))
        await send_word(sock, Ask(ticket.offer_id, peer.secret, num_bytes, direct))
        yield sock, await receive_word(sock, Grant)
        await send_word(sock, Fetched())
        await receive_word(sock, Stands)


async def fetch_stream(ticket: Ticket, into: Memory) -> None:
    """Fetch an offer over the socket into host memory. Raises like `asking`."""
    async with asking(ticket, into.num_bytes, direct=False) as (sock, _):
        await receive_bytes(sock, host_view(into))
