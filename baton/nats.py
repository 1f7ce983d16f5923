"""The request plane over NATS: frames as messages, one wildcard subject per worker and per caller.

A caller draws a token for each link. Frames to the worker go to `WORKER.token` with reply subject
`CALLER.token`, frames to the caller the other way round. So a frame to a dead process comes back at once as
the server's "no responders" (503), with the token of its link.
"""

import asyncio
import contextlib
import functools
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client

from baton.errors import BrokerLost, WorkerLost
from baton.messages import Reply, Request
from baton.nats_connection import CONNECT_TIMEOUT_S, LIMITS, Box, Mac, NatsWire, Post, limit_silence
from baton.pace import LIVENESS_S, TICK_S, Pace
from baton.serving import Service, WorkerLink
from baton.streams import CallerLink, call_over
from baton.transport import Respond

_SETTLE_S = 2 * TICK_S
"""After an outage, workers have this time to reconnect too, before calls go to them."""
_SCHEME = "nats://"
_CALLER = "baton.v1.caller."
_WORKER = "baton.v1.worker."
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_CLOSED = "this process closed its transport"
_AWAY = "the NATS server is unreachable"
# By default nats-py gives up after 60 attempts and notices a hung server after 4 minutes, here in 2 to 3 s.
_OPTIONS: dict[str, Any] = {
    "name": "baton", "connect_timeout": CONNECT_TIMEOUT_S,
    "max_reconnect_attempts": -1, "reconnect_time_wait": TICK_S,
    "ping_interval": 1, "max_outstanding_pings": 2,
}  # fmt: skip


async def _ignore(error: Exception) -> None:
    """An error that is raised as well."""


_ONCE: dict[str, Any] = {"allow_reconnect": False, "error_cb": _ignore}

# nats-py reports these with every attempt to connect.
_OUTAGES = (OSError, TimeoutError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)
log = logging.getLogger(__name__)

_LATER_THAN_LIVENESS_S = 1.0  # a server that stands still for a moment is no fault


class NatsTransport:
    """`Transport` over a NATS server or cluster; addresses are `nats://SUBJECT#KEY`, both new for each
    `serve`. `server_urls`: comma-separated.

    Connects on first use and reconnects forever. A worker that is silent for `liveness_s` is lost. `options`
    are passed to nats-py's `connect`: `user`, `password`, `token`, `user_credentials`, `nkeys_seed`, `tls`.
    """

    def __init__(self, server_urls: str, *, liveness_s: float = LIVENESS_S, **options: Any) -> None:
        self._pace = Pace.of(liveness_s)
        self._untaken_s = liveness_s + _LATER_THAN_LIVENESS_S
        self._server_urls = [url.strip() for url in server_urls.split(",")]
        callbacks = {"error_cb": _on_error, "disconnected_cb": self._on_disconnect}
        self._options: dict[str, Any] = {"flush_timeout": liveness_s, **callbacks, **_OPTIONS, **options}
        self._connecting: asyncio.Task[Post] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._inbox = Box(f"{_CALLER}{secrets.token_hex(8)}")
        self._links: dict[str, CallerLink] = {}
        self._boxes = [self._inbox]
        self._closed = False

    @contextlib.asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:
        """`Transport.serve`. Raises ConnectionError if the NATS server is unreachable."""
        subject = f"{_WORKER}{_UNFIT.sub('_', worker_id)}.{secrets.token_hex(4)}"
        key = secrets.token_hex(16)
        service = Service(subject, respond, self._pace)
        post = await self._connected()

        def accept(to: str, reply: str, forget: Callable[[], object]) -> WorkerLink:
            return service.accept(NatsWire(post, key, to, reply, forget))

        box = Box(subject, key, accept)
        subscription = await post.subscribe(box)
        self._boxes.append(box)
        try:
            yield f"{_SCHEME}{subject}#{key}"
        finally:
            await service.stop()
            self._boxes.remove(box)
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def call(self, address: str, request: Request) -> AsyncGenerator[Reply, None]:
        """`Transport.call`."""
        return call_over(functools.partial(self._link_to, address), request)

    def lose(self, address: str, reason: str) -> None:
        """`Transport.lose`."""
        if (link := self._links.get(address)) is not None:
            link.lose(reason)

    async def refusal(self) -> str | None:
        """Why the server does not let this process in; None if it does, or if it is unreachable."""
        client = Client()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(self._server_urls, **self._options | _ONCE)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            return str(error) if "authorization" in str(error).lower() else None
        finally:
            await client.close()
        return None

    async def reachable(self) -> None:
        """`Transport.reachable`."""
        while not self._closed:
            try:
                await self._connected()
            except ConnectionError:
                await asyncio.sleep(TICK_S)  # the server is away: try again after a pause
            else:
                return

    async def close(self) -> None:
        """`Transport.close`."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
        for link in list(self._links.values()):
            link.lose(_CLOSED)
        if self._connecting is not None:
            with contextlib.suppress(ConnectionError):
                await (await self._connecting).close()

    async def _link_to(self, address: str) -> CallerLink:
        """The live link to `address`. Raises WorkerLost or BrokerLost if it cannot be made."""
        link = self._links.get(address)
        if link is not None:
            return link
        if self._closed:
            raise WorkerLost(_CLOSED)
        subject, _, key = address.removeprefix(_SCHEME).partition("#")
        if not subject.startswith(_WORKER):
            raise WorkerLost(f"{address!r} is not a NATS worker address")
        try:
            post = await self._connected()
        except ConnectionError as error:
            raise BrokerLost(str(error)) from error
        return self._links.get(address) or self._new_link(post, address, subject, key)

    def _new_link(self, post: Post, address: str, subject: str, key: str) -> CallerLink:
        token = secrets.token_hex(8)
        mine = f"{self._inbox.subject}.{token}"

        def forget() -> None:
            self._links.pop(address, None)
            self._inbox.links.pop(token, None)

        wire = NatsWire(post, key, f"{subject}.{token}", mine, forget)
        link = CallerLink(wire, subject, self._pace, on_silence=functools.partial(self._ask, post))
        self._links[address] = link
        self._inbox.links[token] = link, Mac(key, mine)
        return link

    async def _connected(self) -> Post:
        """The connection, made on first use. Raises ConnectionError."""
        if self._closed:
            raise ConnectionError(_CLOSED)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._on_connect)
        post = await asyncio.shield(self._connecting)
        if not (post.connected and post.answering):
            raise ConnectionError(_AWAY)
        return post

    def _on_connect(self, task: asyncio.Task[Post]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._connecting = None  # the next caller tries again

    async def _connect(self) -> Post:
        client = Client()

        async def reconnected() -> None:
            limit_silence(client, self._untaken_s)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(self._server_urls, reconnected_cb=reconnected, **self._options)
                limit_silence(client, self._untaken_s)
                await client.subscribe(f"{self._inbox.subject}.*", cb=self._inbox.receive, **LIMITS)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await client.close()
            place = ", ".join(url.rpartition("@")[2] for url in self._server_urls)  # without credentials
            raise ConnectionError(f"no NATS server at {place}: {error!r}") from error
        return Post(client, self._inbox)

    async def _on_disconnect(self) -> None:
        if self._connecting is not None and self._connecting.done() and not self._closed:
            post = self._connecting.result()
            self._lose_server(post)
            self._ask(post)

    def _ask(self, post: Post) -> None:
        """A link is silent, or the connection was lost: find out whether the server answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._asked(post))

    async def _asked(self, post: Post) -> None:
        while not await post.answers():
            self._lose_server(post)
        if not post.answering:
            await asyncio.sleep(_SETTLE_S)  # until workers have reconnected too
            post.answering = True
            log.info("plane=reachable kind=nats")
        for link in list(self._links.values()):
            link.lose_if_silent()

    def _lose_server(self, post: Post) -> None:
        """Frames may have been lost, so drop every link on both sides; calls start again."""
        if post.answering:
            log.warning("plane=unreachable kind=nats")
        post.answering = False
        post.forget_all()
        for link in list(self._links.values()):
            link.lose(_AWAY, BrokerLost)
        for box in self._boxes:
            for served, _ in list(box.links.values()):
                served.lose(_AWAY)


async def _on_error(error: Exception) -> None:
    level = logging.DEBUG if isinstance(error, _OUTAGES) else logging.WARNING
    log.log(level, "nats_error reason=%r", error)
