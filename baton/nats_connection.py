"""One process's connection to a NATS server: its subjects, and the frames waiting to be published.

Anyone who can reach the server can publish to any subject. So each frame carries a MAC, with a key that is in
the worker's address: only those who can read the registry know it.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
import socket
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from baton import frames
from baton.serving import WorkerLink
from baton.strangers import strangers
from baton.streams import CallerLink

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

Link = CallerLink | WorkerLink
log = logging.getLogger(__name__)


def limit_silence(client: Client, limit_s: float) -> None:
    """The kernel ends the connection when the server has accepted nothing for `limit_s`.

    nats-py connects again only when everything unsent was sent or the connection has ended, which TCP on its
    own leaves to retries that grow to minutes.
    """
    transport = client._transport  # noqa: SLF001  nats-py has no option for it
    if isinstance(transport, TcpTransport) and transport._io_writer is not None:  # noqa: SLF001  as above
        sock = transport._io_writer.get_extra_info("socket")  # noqa: SLF001  as above
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))


class Mac:
    """Signs the frames that are published to `subject` with a key that both ends know."""

    def __init__(self, key: str, subject: str) -> None:
        self._begun = blake2b(
            subject.encode(), key=key.encode()[: blake2b.MAX_KEY_SIZE], digest_size=MAC_BYTES
        )

    def sign(self, frame: bytes) -> bytes:
        """The frame with its MAC."""
        return self._of(frame) + frame

    def opened(self, signed: bytes) -> bytes | None:
        """The frame without its MAC; None if it is not genuine."""
        frame = signed[MAC_BYTES:]
        return frame if hmac.compare_digest(self._of(frame), signed[:MAC_BYTES]) else None

    def _of(self, frame: bytes) -> bytes:
        mac = self._begun.copy()
        mac.update(frame)
        return mac.digest()


Accept = Callable[[str, str, Callable[[], object]], WorkerLink]
"""Makes the link to a new caller, given the caller's subject, the worker's subject, and a function to forget
it.
"""


class Box:
    """One wildcard subject of this process, and the links that end there, by token, with the MAC of what they
    get. `echo` is set when a message to the token ECHO arrives. A worker's box has its `key`.
    """

    def __init__(self, subject: str, key: str = "", accept: Accept | None = None) -> None:
        self.subject = subject
        self.links: dict[str, tuple[Link, Mac]] = {}
        self.echo = asyncio.Event()
        self._key = key
        self._accept = accept

    async def receive(self, message: Msg) -> None:
        """Pass a frame to its link; a worker's box creates the link for a new caller."""
        token = message.subject.rpartition(".")[2]
        found = self.links.get(token)
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            if found is not None:
                found[0].lose("its subject has no subscriber any more")
        elif found is not None:
            link, mac = found
            frame = mac.opened(message.data)
            if frame is not None:
                link.receive(frame)
            else:
                strangers.note(self.subject)
        elif token == ECHO:
            self.echo.set()
        elif self._accept is not None and message.reply:
            self._receive_first(message, token, self._accept)

    def _receive_first(self, message: Msg, token: str, accept: Accept) -> None:
        mac = Mac(self._key, message.subject)
        frame = mac.opened(message.data)
        if frame is None:
            strangers.note(self.subject)
            return
        link = accept(message.reply, message.subject, functools.partial(self.links.pop, token, None))
        self.links[token] = link, mac
        link.receive(frame)


class Post:
    """The connection to the server and the frames waiting to be published.

    nats-py's `publish` is a coroutine; one task runs it for all links. It waits while nats-py buffers 2 MiB;
    when _HIGH_WATER_BYTES more wait here, generators wait too. `answering` is whether the server did when it
    was last asked.
    """

    def __init__(self, client: Client, inbox: Box) -> None:
        self.answering = True
        self.writable = asyncio.Event()
        self.writable.set()
        self._client = client
        self._inbox = inbox
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
        return min(int(self._client.max_payload), frames.MAX_FRAME_BYTES) - MAC_BYTES

    async def answers(self) -> bool:
        """Whether the server returns a message to this process in time.

        nats-py's `flush` does not serve: a late answer to one that timed out ends its reading.
        """
        if not self.connected:
            await asyncio.sleep(_RETRY_S)  # nats-py is reconnecting
            return False
        self._inbox.echo.clear()
        self.put(f"{self._inbox.subject}.{ECHO}", b"", "")
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._inbox.echo.wait()
        except TimeoutError:
            return False
        return True

    async def subscribe(self, box: Box) -> Subscription:
        """Subscribe to the box's subject and wait for the server's confirmation. Raises ConnectionError."""
        try:
            subscription = await self._client.subscribe(f"{box.subject}.*", cb=box.receive, **LIMITS)
        except nats.errors.Error as error:
            raise ConnectionError(f"the NATS server did not accept a subscription: {error!r}") from error
        if not await self.answers():
            raise ConnectionError("the NATS server did not confirm a subscription in time")
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
        self.forget_all()  # so that the task ends with its publish, whose cancellation nats-py swallows
        for ending in (self._client.flush, self._client.close):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    # nats-py may cancel what it waits for itself here, which does not cancel this task.
                    await asyncio.gather(ending(), return_exceptions=True)

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


class NatsWire:
    """`Wire` of one link: where its frames go, and where answers and 503s come back."""

    def __init__(self, post: Post, key: str, to: str, reply: str, forget: Callable[[], object]) -> None:
        self._mac = Mac(key, to)
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
        self._post.put(self._to, self._mac.sign(frame), self._reply)

    def close(self) -> None:
        """`Wire.close`; the server keeps serving the other links."""
        self._forget()
