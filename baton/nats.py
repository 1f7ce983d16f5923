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
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from baton import frames
from baton.errors import WorkerLost
from baton.messages import Reply, Request
from baton.serving import Service, WorkerLink
from baton.streams import LIVENESS_S, TICK_S, CallerLink, Pace, call_over
from baton.transport import Respond

CONNECT_TIMEOUT_S = 3
CLOSE_S = 1
_HIGH_WATER_BYTES = 1024 * 1024
_SCHEME = "nats://"
_CALLER = "baton.v1.caller."
_WORKER = "baton.v1.worker."
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
_NO_RESPONDERS = "503"
# By default nats-py gives up after 60 attempts and notices a hung server after 4 minutes.
_OPTIONS: dict[str, Any] = {
    "name": "baton", "connect_timeout": CONNECT_TIMEOUT_S,
    "max_reconnect_attempts": -1, "reconnect_time_wait": TICK_S,
    "ping_interval": 5, "max_outstanding_pings": 2,
}  # fmt: skip
# Unsent bytes in this process; beyond it nats-py drops messages, which the frame numbers detect.
_LIMITS: dict[str, Any] = {"pending_bytes_limit": 256 * 1024 * 1024}

Link = CallerLink | WorkerLink
log = logging.getLogger(__name__)


class NatsTransport:
    """`Transport` over a NATS server; addresses are `nats://SUBJECT`, with a new subject for each `serve`.

    Connects on first use and reconnects forever. A worker that is silent for `liveness_s` is lost. `options`
    are passed to nats-py's `connect`: `user`, `password`, `token`, `user_credentials`, `nkeys_seed`, `tls`.
    """

    def __init__(self, server_url: str, *, liveness_s: float = LIVENESS_S, **options: Any) -> None:
        self._pace = Pace.of(liveness_s)
        self._server_url = server_url
        callbacks = {"error_cb": _on_error, "disconnected_cb": self._on_disconnect}
        self._options: dict[str, Any] = {"flush_timeout": liveness_s, **callbacks, **_OPTIONS, **options}
        self._connecting: asyncio.Task[_Post] | None = None
        self._inbox = _Box(f"{_CALLER}{secrets.token_hex(8)}")
        self._links: dict[str, CallerLink] = {}
        self._boxes = [self._inbox]
        self._closed = False

    @contextlib.asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:
        """`Transport.serve`. Raises ConnectionError if the NATS server is unreachable."""
        subject = f"{_WORKER}{_UNFIT.sub('_', worker_id)}.{secrets.token_hex(4)}"
        service = Service(subject, respond, self._pace)
        post = await self._connected()
        box = _Box(subject, accept=lambda to, reply, forget: service.accept(_Wire(post, to, reply, forget)))
        subscription = await post.subscribe(box)
        self._boxes.append(box)
        try:
            yield f"{_SCHEME}{subject}"
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

    async def close(self) -> None:
        """`Transport.close`."""
        self._closed = True
        for link in list(self._links.values()):
            link.lose("this process closed its transport")
        if self._connecting is not None:
            with contextlib.suppress(ConnectionError):
                await (await self._connecting).close()

    async def _link_to(self, address: str) -> CallerLink:
        """The live link to `address`. Raises WorkerLost if it cannot be made."""
        link = self._links.get(address)
        if link is not None:
            return link
        subject = address.removeprefix(_SCHEME)
        if not subject.startswith(_WORKER):
            raise WorkerLost(f"{address!r} is not a NATS worker address")
        try:
            post = await self._connected()
        except ConnectionError as error:
            raise WorkerLost(str(error)) from error
        return self._links.get(address) or self._new_link(post, address, subject)

    def _new_link(self, post: "_Post", address: str, subject: str) -> CallerLink:
        token = secrets.token_hex(8)

        def forget() -> None:
            self._links.pop(address, None)
            self._inbox.links.pop(token, None)

        wire = _Wire(post, f"{subject}.{token}", f"{self._inbox.subject}.{token}", forget)
        link = self._links[address] = self._inbox.links[token] = CallerLink(wire, subject, self._pace)
        return link

    async def _connected(self) -> "_Post":
        """The connection, made on first use. Raises ConnectionError."""
        if self._closed:
            raise ConnectionError("this process closed its transport")
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
            self._connecting.add_done_callback(self._on_connect)
        post = await asyncio.shield(self._connecting)
        if not post.connected:
            raise ConnectionError("the NATS server is unreachable")
        return post

    def _on_connect(self, task: "asyncio.Task[_Post]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._connecting = None  # the next caller tries again

    async def _connect(self) -> "_Post":
        client = Client()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(self._server_url, **self._options)
                await client.subscribe(f"{self._inbox.subject}.*", cb=self._inbox.receive, **_LIMITS)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            await client.close()
            place = self._server_url.rpartition("@")[2]  # before the @ there may be credentials
            raise ConnectionError(f"no NATS server at {place}: {error!r}") from error
        return _Post(client)

    async def _on_disconnect(self) -> None:
        """Frames may have been lost, so drop every link on both sides; calls start again."""
        if self._connecting is not None and self._connecting.done():
            self._connecting.result().forget_all()
        for box in self._boxes:
            for link in list(box.links.values()):
                link.lose("the NATS server is unreachable")


Accept = Callable[[str, str, Callable[[], object]], WorkerLink]
"""Makes the link to a new caller, given the caller's subject, the worker's subject, and a function to forget
it.
"""


class _Box:
    """One wildcard subject of this process, and the links that end there, by token."""

    def __init__(self, subject: str, accept: Accept | None = None) -> None:
        self.subject = subject
        self.links: dict[str, Link] = {}
        self._accept = accept

    async def receive(self, message: Msg) -> None:
        """Pass a frame to its link; a worker's box creates the link for a new caller."""
        token = message.subject.rpartition(".")[2]
        link = self.links.get(token)
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            if link is not None:
                link.lose("its subject has no subscriber any more")
            return
        if link is None and self._accept is not None and message.reply:
            forget = functools.partial(self.links.pop, token, None)
            link = self.links[token] = self._accept(message.reply, message.subject, forget)
        if link is not None:
            link.receive(message.data)


class _Post:
    """The connection to the server and the frames waiting to be published.

    nats-py's `publish` is a coroutine; one task runs it for all links. It waits while nats-py buffers 2 MiB;
    when _HIGH_WATER_BYTES more wait here, generators wait too.
    """

    def __init__(self, client: Client) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self._client = client
        self._waiting: deque[tuple[str, bytes, str]] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._closing = False
        self._publisher = asyncio.get_running_loop().create_task(self._publish())

    @property
    def connected(self) -> bool:
        """Whether the server is connected."""
        return bool(self._client.is_connected)

    @property
    def max_frame_bytes(self) -> int:
        """The server's largest message."""
        return min(int(self._client.max_payload), frames.MAX_FRAME_BYTES)

    async def subscribe(self, box: _Box) -> Subscription:
        """Subscribe to the box's subject and wait for the server's confirmation. Raises ConnectionError."""
        try:
            subscription = await self._client.subscribe(f"{box.subject}.*", cb=box.receive, **_LIMITS)
            await self._client.flush(timeout=CONNECT_TIMEOUT_S)
        except nats.errors.Error as error:
            raise ConnectionError(f"the NATS server did not accept a subscription: {error!r}") from error
        return subscription

    def put(self, subject: str, frame: bytes, reply: str) -> None:
        """Publish `frame` soon. Ignored while disconnected, since every link is lost then."""
        if not self.connected or self._closing:
            return
        self._waiting.append((subject, frame, reply))
        self._waiting_bytes += len(frame)
        self._wake.set()
        if self._waiting_bytes > _HIGH_WATER_BYTES:
            self.writable.clear()

    def forget_all(self) -> None:
        """Drop the waiting frames."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self.writable.set()

    async def close(self) -> None:
        """Send the waiting frames, within CLOSE_S, and disconnect."""
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._publisher}, timeout=CLOSE_S)
        self._publisher.cancel()
        with contextlib.suppress(nats.errors.Error, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._client.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()

    async def _publish(self) -> None:
        while not self._closing or self._waiting:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                subject, frame, reply = self._waiting.popleft()
                self._waiting_bytes -= len(frame)
                try:
                    await self._client.publish(subject, frame, reply)
                except Exception:  # a failure of one frame must not end the task that serves every link
                    # The receiver detects the gap with the next frame.
                    log.exception("publish_failed subject=%s", subject)
            self.writable.set()


class _Wire:
    """`Wire` of one link: where its frames go, and where answers and 503s come back."""

    def __init__(self, post: _Post, to: str, reply: str, forget: Callable[[], object]) -> None:
        self.writable = post.writable
        self._post = post
        self._to = to
        self._reply = reply
        self._forget = forget

    @property
    def max_frame_bytes(self) -> int:
        """`Wire.max_frame_bytes`."""
        return self._post.max_frame_bytes

    def send(self, frame: bytes) -> None:
        """`Wire.send`."""
        self._post.put(self._to, frame, self._reply)

    def close(self) -> None:
        """`Wire.close`; the server keeps serving the other links."""
        self._forget()


async def _on_error(error: Exception) -> None:
    log.warning("nats_error reason=%r", error)
