"""Takes connections in: no more than there are descriptors for; those that ask for nothing make room."""

import asyncio
import errno
import logging
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 65_536
"""What a process asks for at its start, where its hard limit allows that."""
_ACCEPTS_A_TURN = 16
_PAUSE_S = 0.1
_LOG_EVERY_S = 60.0

T = TypeVar("T")
Take = Callable[[socket.socket], asyncio.Protocol | None]


def raise_descriptor_limit(most: int = MOST_DESCRIPTORS) -> None:
    """Move the soft limit of open files to `most`, or to the hard one: shells start programs with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_connections(part: int, at_most: int) -> int:
    """How many connections may come in at one place: a `part`-th of this process's descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return at_most if soft == resource.RLIM_INFINITY else min(at_most, soft // part)


class Admission(Generic[T]):
    """Who is connected, `limit` at most. When it is full, a newcomer takes the place of the one that has been
    waiting longest: connected, and not yet asking for anything. `hang_up` ends that one's connection.
    """

    def __init__(self, limit: int, hang_up: Callable[[T], None]) -> None:
        self._limit = limit
        self._hang_up = hang_up
        self._present: set[T] = set()
        self._waiting: OrderedDict[T, None] = OrderedDict()

    def enter(self, guest: T) -> bool:
        """Take somebody in, who waits; False: there are too many, and all of them are busy."""
        if len(self._present) >= self._limit and not self.make_room():
            return False
        self._present.add(guest)
        self._waiting[guest] = None
        return True

    def make_room(self) -> bool:
        """Hang up on the one that has waited longest; False if nobody waits."""
        if not self._waiting:
            return False
        guest, _ = self._waiting.popitem(last=False)
        self._hang_up(guest)
        return True

    def busy(self, guest: T) -> None:
        """It is being served: it keeps its place."""
        self._waiting.pop(guest, None)

    def wait(self, guest: T) -> None:
        """It has been served, and may ask again."""
        if guest in self._present:
            self._waiting[guest] = None

    def leave(self, guest: T) -> None:
        """Its connection has ended."""
        self._present.discard(guest)
        self._waiting.pop(guest, None)


class Listener:
    """Accepts on a listening socket. `take` is given each connection and keeps it, or returns the protocol
    that the event loop is to run on it.

    The event loops' own servers do not survive a lack of descriptors: uvloop's closes the listening socket
    for good. This one calls `make_room` and looks again a moment later.
    """

    def __init__(self, listener: socket.socket, take: Take, make_room: Callable[[], object]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._take = take
        self._make_room = make_room
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._logged_s = -_LOG_EVERY_S
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Take nobody in any more; what was accepted stays."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):  # the rest of this process wants its turn too
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause(error)
                return
            sock.setblocking(False)
            protocol = self._take(sock)
            if protocol is not None:
                task = self._loop.create_task(_connect(sock, protocol))
                self._connecting.add(task)
                task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        """Whoever waits to be accepted keeps the socket readable: without a pause this would spin."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("accept=paused port=%d error=%s", self._listener.getsockname()[1], error)
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            self._make_room()
        self._loop.remove_reader(self._listener)
        self._paused = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)


async def _connect(sock: socket.socket, protocol: asyncio.Protocol) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)
    except OSError as error:
        sock.close()
        protocol.connection_lost(error)
