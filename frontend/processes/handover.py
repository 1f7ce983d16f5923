"""Passes accepted connections from the supervisor to a process over a Unix socket."""

import errno
import os
import socket
from collections.abc import Callable

_READY = b"r"
_CONNECTION = b"c"


class SupervisorEnd:
    """The supervisor's end of the channel to one process."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self.is_ready = False
        self._channel = channel

    def fileno(self) -> int:
        """For selectors."""
        return self._channel.fileno()

    def receive(self) -> bool:
        """Note that the process is ready; False if it has closed its end."""
        try:
            self.is_ready = self._channel.recv(1) == _READY
        except BlockingIOError:
            return True
        except OSError:
            self.is_ready = False
        return self.is_ready

    def pass_on(self, connection: socket.socket) -> bool:
        """Pass a connection on; False if the process cannot take it now."""
        try:
            socket.send_fds(self._channel, [_CONNECTION], [connection.fileno()])
        except OSError:  # its buffer is full, or it is ending
            return False
        return True

    def close(self) -> None:
        """Close this end: the process drains."""
        self._channel.close()


class ProcessEnd:
    """The process's end: a stand-in for the listening socket at `address`. `on_end` is called when the
    supervisor has gone.
    """

    def __init__(
        self, channel: socket.socket, address: tuple[str, int], on_end: Callable[[], object]
    ) -> None:
        self._channel = channel
        self._address = address
        self._on_end = on_end

    def ready(self) -> None:
        """Tell the supervisor to send connections."""
        try:
            self._channel.send(_READY)
        except OSError:
            self._on_end()

    def fileno(self) -> int:
        """For the event loop."""
        return self._channel.fileno()

    def setblocking(self, flag: bool, /) -> None:
        """As a socket's."""
        self._channel.setblocking(flag)

    def getsockname(self) -> tuple[str, int]:
        """The address that the supervisor listens on."""
        return self._address

    def accept(self) -> tuple[socket.socket, None]:
        """The next connection, and no address. Raises OSError like a socket: BlockingIOError if none is
        waiting, EMFILE if one was lost because this process cannot open more files.
        """
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not data:
            self._on_end()
            raise BlockingIOError
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.set_inheritable(descriptors[0], False)
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        """Close this end: the supervisor passes no more connections on."""
        self._channel.close()


def channel() -> tuple[socket.socket, socket.socket]:
    """The two ends, which keep the limits of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
