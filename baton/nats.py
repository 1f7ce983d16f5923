"""The request plane over NATS: frames as messages, one wildcard subject per worker and per caller.

A caller draws a token for each link. Frames to the worker go to `WORKER.token` with reply subject
`CALLER.token`, frames to the caller the other way round. So a frame to a dead process comes back at once as
the server's "no responders" (503), with the token of its link."""

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from hashlib import blake2b
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from baton import frames
from baton.errors import BrokerLost, WorkerLost
from baton.pace import LIVENESS_S, TICK_S
from baton.streams import CLOSED, CallerLink, Plane, Service, WorkerLink
from baton.telemetry import unauthenticated
from baton.transport import Respond

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3
CLOSE_S = 1
_HIGH_WATER_BYTES = 1024 * 1024
ECHO = "echo"
MAC_BYTES = 16
ANSWER_S = 1.0
"""A server that takes longer to return a message is away."""
_RETRY_S = 0.25
NO_RESPONDERS = "503"
# Unsent bytes in this process; beyond it nats-py drops messages, which the frame numbers detect.
LIMITS: dict[str, Any] = {"pending_bytes_limit": 256 * 1024 * 1024}


def limit_silence(client: Client, limit_s: float) -> None:
    """The kernel ends the connection when the server has accepted nothing for `limit_s`.

    nats-py connects again only when everything unsent was sent or the connection has ended, which TCP on its
    own leaves to retries that grow to minutes."""
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001  nats-py has no option for it
    if writer is not None:  # the connection stands
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))


class Mailbox:
    """One wildcard subject of this process, and the links that end there, by token. `echo` is set when a
    message to the token ECHO arrives. A worker's mailbox has its service, and makes the wires to callers."""

    def __init__(
        self, subject: str, service: Service | None = None, new_wire: "Callable[..., NatsWire] | None" = None
    ) -> None:
        self.subject = subject
        self.wires: dict[str, NatsWire] = {}
        self.echo = asyncio.Event()
        self._service = service
        self._new_wire = new_wire

    async def receive(self, message: Msg) -> None:
        """Pass a frame to its link; a worker's mailbox creates the link for a new caller."""
        token = message.subject.rpartition(".")[2]
        wire = self.wires.get(token)
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            if wire is not None:
                wire.link.lose("its subject has no subscriber any more")
        elif wire is not None:
            if (frame := wire.opened(message.data)) is not None:
                wire.link.receive(frame)
        elif token == ECHO:
            self.echo.set()
        elif self._service is not None and self._new_wire is not None and message.reply:
            wire = self._new_wire(message.reply, message.subject, partial(self.wires.pop, token, None))
            if (frame := wire.opened(message.data)) is not None:
                wire.link = WorkerLink(wire, self._service)
                self.wires[token] = wire
                wire.link.receive(frame)


class Publisher:
    """The connection to the server and the frames waiting to be published.

    nats-py's `publish` is a coroutine; one task runs it for all links. It waits while nats-py buffers 2 MiB;
    when _HIGH_WATER_BYTES more wait here, generators wait too. `answering`: the result of the last probe of
    the server."""

    def __init__(self, client: Client, inbox: Mailbox) -> None:
        self.answering = True
        self.writable = asyncio.Event()
        self.writable.set()
        self._client = client
        self._inbox = inbox
        self._waiting: deque[tuple[str, bytes, str]] = deque()
        self._waiting_bytes = 0
        self._publishing: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.answering and bool(self._client.is_connected)

    @property
    def max_frame_bytes(self) -> int:
        return min(int(self._client.max_payload), frames.MAX_FRAME_BYTES) - MAC_BYTES

    async def answers(self) -> bool:
        """Whether the server returns a message to this process in time.

        nats-py's `flush` does not serve: a late answer to one that timed out ends its reading."""
        if not self._client.is_connected:
            await asyncio.sleep(_RETRY_S)  # nats-py is reconnecting
            return False
        self._inbox.echo.clear()
        self.put(f"{self._inbox.subject}.{ECHO}", b"", "")
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._inbox.echo.wait()
        except TimeoutError:
            return False

    async def subscribe(self, mailbox: Mailbox) -> Subscription:
        """Subscribe to the subject and wait for the confirmation. Raises ConnectionError."""
        try:
            subscription = await self._client.subscribe(f"{mailbox.subject}.*", cb=mailbox.receive, **LIMITS)
        except nats.errors.Error as error:
            raise ConnectionError(f"the NATS server did not accept a subscription: {error!r}") from error
        if not await self.answers():
            raise ConnectionError("the NATS server did not confirm a subscription in time")
        return subscription

    def put(self, subject: str, frame: bytes, reply: str) -> None:
        """Publish `frame` soon. Ignored while disconnected, since every link is lost then."""
        if not self._client.is_connected:
            return
        self._waiting.append((subject, frame, reply))
        self._waiting_bytes += len(frame)
        if self._waiting_bytes > _HIGH_WATER_BYTES:
            self.writable.clear()
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().create_task(self._publish())

    def forget_all(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0
        self.writable.set()

    async def close(self) -> None:
        if self._publishing is not None:
            await asyncio.wait({self._publishing}, timeout=CLOSE_S)
        self.forget_all()  # so that the task ends with its publish, whose cancellation nats-py swallows
        for ending in (self._client.flush, self._client.close):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    # nats-py may cancel what it waits for itself here, which does not cancel this task.
                    await asyncio.gather(ending(), return_exceptions=True)

    async def _publish(self) -> None:
        while self._waiting:
            subject, frame, reply = self._waiting.popleft()
            self._waiting_bytes -= len(frame)
            try:
                await self._client.publish(subject, frame, reply)
            except Exception:  # a failure of one frame must not end the task that serves every link
                # The receiver detects the gap with the next frame.
                log.exception("publish_failed subject=%s", subject)
        self.writable.set()
        self._publishing = None


class NatsWire:
    """`Wire` of one link: its frames go to the subject `to`, answers and 503s come back to `back`. Each frame
    is signed for its subject, with a key that both ends know."""

    link: CallerLink | WorkerLink

    def __init__(
        self, publisher: Publisher, key: str, to: str, back: str, forget: Callable[[], object]
    ) -> None:
        self.writable = publisher.writable
        self._publisher = publisher
        self._to = to
        self._back = back
        self._forget = forget
        new = partial(blake2b, key=key.encode()[: blake2b.MAX_KEY_SIZE], digest_size=MAC_BYTES)
        self._sent, self._received = new(to.encode()), new(back.encode())

    @property
    def max_frame_bytes(self) -> int:
        return self._publisher.max_frame_bytes

    def send(self, frame: bytes) -> None:
        self._publisher.put(self._to, _mac(self._sent, frame) + frame, self._back)

    def opened(self, signed: bytes) -> bytes | None:
        """A frame without its MAC; None if it is not genuine."""
        frame = signed[MAC_BYTES:]
        if hmac.compare_digest(_mac(self._received, frame), signed[:MAC_BYTES]):
            return frame
        unauthenticated.note("the request plane")
        return None

    def close(self) -> None:
        self._forget()


def _mac(begun: blake2b, frame: bytes) -> bytes:
    mac = begun.copy()
    mac.update(frame)
    return mac.digest()


_SETTLE_S = 2 * TICK_S
"""After an outage, workers have this time to reconnect too, before calls go to them."""
_SCHEME = "nats://"
_WORKER = "baton.v1.worker."
_AWAY = "the NATS server is unreachable"
# By default nats-py gives up after 60 attempts and notices a hung server after 4 minutes, here in 2 to 3 s.
_OPTIONS: dict[str, Any] = {
    "name": "baton", "connect_timeout": CONNECT_TIMEOUT_S,
    "max_reconnect_attempts": -1, "reconnect_time_wait": TICK_S,
    "ping_interval": 1, "max_outstanding_pings": 2,
}  # fmt: skip

# nats-py reports these with every attempt to connect.
_OUTAGES = (OSError, TimeoutError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)
_LATER_THAN_LIVENESS_S = 1.0  # short pauses of the server are tolerated


class _Client(Client):
    def _connect_command(self) -> bytes:
        """The login, which nats-py sends in plain to a server that does not ask for TLS."""
        server = self._current_server
        is_wanted = "tls" in self.options or (server is not None and server.uri.scheme == "tls")
        if is_wanted and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server does not use TLS")
        return super()._connect_command()


class NatsTransport(Plane):
    """`Transport` over a NATS server or cluster; addresses are `nats://SUBJECT#KEY`, both new for each
    `serve`. `server_urls`: comma-separated.

    Connects on first use and reconnects forever. A worker that is silent for `liveness_s` is lost. `options`
    are passed to nats-py's `connect`."""

    def __init__(self, server_urls: str, *, liveness_s: float = LIVENESS_S, **options: Any) -> None:
        super().__init__(liveness_s)
        self._untaken_s = liveness_s + _LATER_THAN_LIVENESS_S
        self._server_urls = [url.strip() for url in server_urls.split(",")]
        callbacks = {"error_cb": self._on_error, "disconnected_cb": self._on_disconnect}
        self._options: dict[str, Any] = {"flush_timeout": liveness_s, **callbacks, **_OPTIONS, **options}
        self._connecting: asyncio.Task[Publisher] | None = None
        self._publisher: Publisher | None = None
        self.problem = ""  # what last kept this process from a server that is there
        self._probing: asyncio.Task[None] | None = None
        self._inbox = Mailbox(f"baton.v1.caller.{secrets.token_hex(8)}")
        self._mailboxes = [self._inbox]

    @contextlib.asynccontextmanager
    async def serve(self, worker_id: str, respond: Respond) -> AsyncIterator[str]:
        """`Transport.serve`. Raises ConnectionError if the NATS server is unreachable."""
        subject = f"{_WORKER}{re.sub(r'[^A-Za-z0-9_-]', '_', worker_id)}.{secrets.token_hex(4)}"
        key = secrets.token_hex(16)
        service = Service(subject, respond, self._pace)
        publisher = await self._connected()
        mailbox = Mailbox(subject, service, partial(NatsWire, publisher, key))
        subscription = await publisher.subscribe(mailbox)
        self._mailboxes.append(mailbox)
        try:
            yield f"{_SCHEME}{subject}#{key}"
        finally:
            await service.stop()
            self._mailboxes.remove(mailbox)
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    @property
    def is_reachable(self) -> bool:
        return self._publisher is not None and self._publisher.is_up

    async def reachable(self) -> None:
        while not self._closed:
            try:
                await self._connected()
            except ConnectionError:
                await asyncio.sleep(TICK_S)  # the server is away: try again after a pause
            else:
                return

    async def close(self) -> None:
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
        self._lose_all(CLOSED)
        if self._connecting is not None:
            with contextlib.suppress(ConnectionError):
                await (await self._connecting).close()

    async def _connect(self, address: str) -> CallerLink:
        """Raises WorkerLost or BrokerLost."""
        if self._closed:
            raise WorkerLost(CLOSED)
        subject, _, key = address.removeprefix(_SCHEME).partition("#")
        if not subject.startswith(_WORKER):
            raise WorkerLost(f"{address!r} is not a NATS worker address")
        try:
            publisher = await self._connected()
        except ConnectionError as error:
            raise BrokerLost(str(error)) from error
        if address in self._links:  # made while this one waited
            return self._links[address]
        token = secrets.token_hex(8)

        def forget() -> None:
            self._links.pop(address, None)
            self._inbox.wires.pop(token, None)

        wire = NatsWire(publisher, key, f"{subject}.{token}", f"{self._inbox.subject}.{token}", forget)
        link = CallerLink(wire, subject, self._pace, on_silence=partial(self._start_probe, publisher))
        self._links[address] = wire.link = link
        self._inbox.wires[token] = wire
        return link

    async def _connected(self) -> Publisher:
        """The connection, made on first use. Raises ConnectionError."""
        if self._closed:
            raise ConnectionError(CLOSED)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._log_in())
        publisher = await asyncio.shield(self._connecting)
        if not publisher.is_up:
            raise ConnectionError(_AWAY)
        return publisher

    async def _log_in(self) -> Publisher:
        client = _Client()

        async def reconnected() -> None:
            limit_silence(client, self._untaken_s)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await client.connect(self._server_urls, reconnected_cb=reconnected, **self._options)
                limit_silence(client, self._untaken_s)
                await client.subscribe(f"{self._inbox.subject}.*", cb=self._inbox.receive, **LIMITS)
            publisher = self._publisher = Publisher(client, self._inbox)
        except (OSError, TimeoutError, nats.errors.Error) as error:
            place = ", ".join(url.rpartition("@")[2] for url in self._server_urls)  # without credentials
            raise ConnectionError(f"no NATS server at {place}: {error!r}") from error
        finally:
            if self._publisher is None:
                self._connecting = None  # the next caller tries again, even if this fails to close
                await client.close()
        return publisher

    async def _on_error(self, error: Exception) -> None:
        """An outage is logged elsewhere. What else keeps this process away, such as a wrong login, comes with
        every attempt to connect, too: it is logged once."""
        is_outage = isinstance(error, _OUTAGES) and not isinstance(error, ssl.SSLError)
        problem = str(error)
        is_known = is_outage or (problem == self.problem and not self.is_reachable)
        log.log(logging.DEBUG if is_known else logging.WARNING, "nats_error reason=%s", problem)
        if not is_outage:
            self.problem = problem

    async def _on_disconnect(self) -> None:
        if self._publisher is not None and not self._closed:
            self._lose_server(self._publisher)
            self._start_probe(self._publisher)

    def _start_probe(self, publisher: Publisher) -> None:
        """A link is silent, or the connection was lost: find out whether the server answers."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe(publisher))

    async def _probe(self, publisher: Publisher) -> None:
        now_s = asyncio.get_running_loop().time
        asked_s = now_s()
        while not await publisher.answers():
            self._lose_server(publisher)
        if not publisher.answering or now_s() - asked_s > TICK_S:
            await asyncio.sleep(_SETTLE_S)  # until workers have reconnected too, and what they sent is here
        if not publisher.answering:
            publisher.answering = True
            log.info("plane=reachable kind=nats")
        for link in list(self._links.values()):
            link.lose_if_silent()

    def _lose_server(self, publisher: Publisher) -> None:
        """Frames may have been lost, so drop every link on both sides; calls start again."""
        if publisher.answering:
            log.warning("plane=unreachable kind=nats")
        publisher.answering = False
        publisher.forget_all()
        self._lose_all(_AWAY, BrokerLost)
        for mailbox in self._mailboxes:
            for wire in list(mailbox.wires.values()):
                wire.link.lose(_AWAY)
