"""Restarts that refuse no connection: the next frontend takes the listening socket of the running one over.

The running frontend waits for the next one at a Unix socket, whose abstract name has the user and the port.
It gives both sockets away, so that the name never has to become free. The next one reports when it serves.
"""

import asyncio
import contextlib
import logging
import os
import socket

from baton.tcp import is_own

_FIRST_INHERITED = 3  # sd_listen_fds(3)
_SOCKETS = b"l"
_SERVING = b"s"
_PAUSE_S = 0.1
TAKE_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class Port:
    """This frontend's listening socket, and the `door` at which the next frontend connects for it. `running`
    leads to the frontend that both came from.
    """

    def __init__(
        self,
        listener: socket.socket,
        door: socket.socket | None = None,
        running: socket.socket | None = None,
    ) -> None:
        self.listener = listener
        self._door = door
        self._running = running

    @classmethod
    def taken(cls, number: int) -> "Port | None":
        """The port of this user's running frontend, None if there is none."""
        running = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        running.settimeout(TAKE_TIMEOUT_S)
        try:
            running.connect(_name(number))
            if is_own(running):
                _, descriptors, _, _ = socket.recv_fds(running, 1, 2)
                listener, door = (socket.socket(fileno=descriptor) for descriptor in descriptors)
                return cls(listener, door, running)
        except (OSError, ValueError):  # none runs, or it hangs or ends
            pass
        running.close()
        return None

    @property
    def is_taken(self) -> bool:
        """Whether another frontend serves on it until this one does."""
        return self._running is not None

    async def passed_on(self) -> None:
        """Call when this frontend serves: the one before it drains. Returns when the next one serves."""
        if self._running is not None:
            with contextlib.suppress(OSError):
                self._running.send(_SERVING)
            self._running.close()
            self._running = None
        if self._door is None:
            self._door = _new_door(self.listener.getsockname()[1])
        with self._door as door:
            door.setblocking(False)
            while not await self._is_passed_on(door):
                pass
        log.info("the next frontend serves: draining")

    def close(self) -> None:
        """Close this process's descriptors of the sockets."""
        for each in (self.listener, self._door, self._running):
            if each is not None:
                each.close()

    async def _is_passed_on(self, door: socket.socket) -> bool:
        """Give the sockets to the next frontend; whether it serves then. It may end before."""
        loop = asyncio.get_running_loop()
        try:
            taker, _ = await loop.sock_accept(door)
            with taker:
                if not is_own(taker):
                    return False
                socket.send_fds(taker, [_SOCKETS], [self.listener.fileno(), door.fileno()])
                return await loop.sock_recv(taker, 1) == _SERVING
        except OSError as error:  # it has ended, or there are no descriptors
            log.warning("the port was not handed over error=%s", error)
            await asyncio.sleep(_PAUSE_S)
            return False


def inherited() -> socket.socket | None:
    """The listening socket that systemd passes to this process (sd_listen_fds(3)), if any. Raises OSError if
    it does not listen.
    """
    num_sockets, pid = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))
    if pid != str(os.getpid()):
        return None
    listener = socket.socket(fileno=_FIRST_INHERITED)
    if num_sockets != "1" or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError("systemd passed more than one socket, or one that does not listen; use ListenStream=")
    return listener


def _new_door(number: int) -> socket.socket:
    """A socket at the name of this port; if the name is in use, one that nobody finds."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(_name(number))
    except OSError as error:
        log.warning("a next frontend cannot take over the port error=%s", error)
        door.bind(b"")  # a name of the kernel's choice
    door.listen()
    return door


def _name(number: int) -> bytes:
    return b"\0baton-frontend-%d-%d" % (os.getuid(), number)
