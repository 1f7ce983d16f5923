"""Passes accepted connections from the supervisor to a process over a Unix socket."""

import errno
import os
import socket
from collections.abc import Callable, MutableMapping

import msgspec

READY = b"r"
_CONNECTION = b"c"
_VARIABLE = "BATON_FRONTEND_PROCESS"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place in the frontend: the frontend's `folder` and listening `address`, the descriptor of
    the process's end of the `channel` to the supervisor, and whether the port is being taken over.
    """

    index: int
    channel: int
    folder: str
    address: tuple[str, int]
    takes_over: bool

    def environ(self) -> dict[str, str]:
        """The variable that the process reads."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def told(cls, environ: MutableMapping[str, str] = os.environ) -> "Place | None":
        """This process's place; None if no supervisor started it."""
        text = environ.pop(_VARIABLE, None)
        return None if text is None else msgspec.json.decode(text, type=cls)


class ProcessEnd:
    """The process's end of the channel: a stand-in for the listening socket at `address`. `on_end` is called
    when the supervisor has gone.
    """

    def __init__(
        self, channel: socket.socket, address: tuple[str, int], on_end: Callable[[], object]
    ) -> None:
        os.set_inheritable(channel.fileno(), False)
        self._channel = channel
        self._address = address
        self._on_end = on_end

    def ready(self) -> None:
        """Tell the supervisor to send connections."""
        try:
            self._channel.send(READY)
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


def pass_on(connection: socket.socket, channel: socket.socket) -> bool:
    """Pass a connection on, from the supervisor's end; False if the process cannot take it now."""
    try:
        socket.send_fds(channel, [_CONNECTION], [connection.fileno()])
    except OSError:  # its buffer is full, or it is ending
        return False
    return True
