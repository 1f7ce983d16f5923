"""Restarts that refuse no connection: the next frontend takes over the listening socket of the running one.

The running frontend offers its socket under an abstract Unix name, which exists while it runs, in the network
namespace of its port. The next one takes it, and tells the running one to drain once it serves.
"""

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

_FIRST_INHERITED = 3  # sd_listen_fds(3)
_LISTENER = b"l"
_SERVING = b"s"
TAKE_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class Watch(Protocol):
    """An event loop's way to call back when a descriptor is readable."""

    def __call__(self, readable: socket.socket, callback: Callable[[], object] | None) -> None:
        """Watch a socket, or with None stop watching it."""
        ...


class Offer:
    """Offers `listener` to the next frontend of this user; `drain` is called once that one serves."""

    def __init__(self, listener: socket.socket, watch: Watch, drain: Callable[[], object]) -> None:
        self._listener = listener
        self._watch = watch
        self._drain = drain
        self._sockets: set[socket.socket] = set()
        self.is_open = False

    def open(self) -> None:
        """Make the offer. Without it, e.g. on another system than Linux, a restart refuses connections."""
        self.is_open = True
        with contextlib.ExitStack() as unless_open:
            try:
                offer = unless_open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                offer.bind(_name(self._listener.getsockname()[1]))
                offer.listen(1)
            except OSError as error:
                log.warning("a next frontend cannot take over the port error=%s", error)
                return
            unless_open.pop_all()
        self._open(offer, lambda: self._accept(offer))

    def close(self) -> None:
        """Withdraw the offer."""
        for opened in list(self._sockets):
            self._close(opened)

    def disown(self) -> None:
        """Close this process's copies after a fork."""
        for opened in self._sockets:
            opened.close()

    def _accept(self, offer: socket.socket) -> None:
        try:
            taker, _ = offer.accept()
        except OSError:
            return
        try:
            if _peer_uid(taker) == os.getuid():
                socket.send_fds(taker, [_LISTENER], [self._listener.fileno()])
                self._open(taker, lambda: self._on_message(taker))
                return
        except OSError as error:
            log.warning("the port was not handed over error=%s", error)
        taker.close()

    def _on_message(self, taker: socket.socket) -> None:
        """The next frontend serves, or has ended before."""
        try:
            is_serving = taker.recv(1) == _SERVING
        except OSError:
            is_serving = False
        if is_serving:
            log.info("the next frontend serves: draining")
            self.close()  # the next one offers the socket from here on
            self._drain()
        else:
            self._close(taker)

    def _open(self, opened: socket.socket, callback: Callable[[], object]) -> None:
        opened.setblocking(False)
        self._sockets.add(opened)
        self._watch(opened, callback)

    def _close(self, opened: socket.socket) -> None:
        self._sockets.discard(opened)
        self._watch(opened, None)
        opened.close()


class Taken:
    """The listening socket of the running frontend, `None` if none runs on this port."""

    def __init__(self, port: int | None) -> None:
        """Without a port, nothing is taken over."""
        self.listener: socket.socket | None = None
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TAKE_TIMEOUT_S)
        if port is None:
            return
        try:
            self._channel.connect(_name(port))
            if _peer_uid(self._channel) == os.getuid():
                _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                self.listener = socket.socket(fileno=descriptors[0])
                os.set_inheritable(descriptors[0], False)
        except (OSError, IndexError):
            return

    def serving(self) -> None:
        """Tell the running frontend, if any, to drain; returns when its name is free."""
        with self._channel, contextlib.suppress(OSError):
            self._channel.send(_SERVING)
            self._channel.recv(1)

    def close(self) -> None:
        """Leave the running frontend as it is."""
        self._channel.close()
        if self.listener is not None:
            self.listener.close()


def inherited(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The listening socket that systemd passes to this process (sd_listen_fds(3)), if any. Raises OSError if
    it does not listen.
    """
    num_sockets = _number(environ, "LISTEN_FDS")
    if _number(environ, "LISTEN_PID") != os.getpid() or not num_sockets:
        return None
    for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
        environ.pop(name, None)
    listener = socket.socket(fileno=_FIRST_INHERITED)
    if num_sockets > 1 or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise OSError("systemd passed more than one socket, or one that does not listen; use ListenStream=")
    os.set_inheritable(_FIRST_INHERITED, False)
    return listener


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _name(port: int) -> bytes:
    return b"\0baton-frontend-%d-%d" % (os.getuid(), port)


def _peer_uid(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
