"""TLS between the fleet's processes: each shows a certificate and accepts those of its authority."""

import contextlib
import os
import ssl
from pathlib import Path

from baton.errors import WorkerLost
from baton.reread import Reread
from baton.tls import client_context, reason, server_context

CERT, KEY, CA = "BATON_PEER_CERT", "BATON_PEER_KEY", "BATON_PEER_CA"
_ROUND_TRIPS = 4


class PeerDistrusted(WorkerLost):
    """This process and a worker do not trust each other: one has no TLS, or another authority."""


class PeerTls:
    """This process's certificate, for both ends of a connection, read again when its files change.

    Any certificate of the authority is accepted, whatever its name: workers register by address, and a
    certificate for it would have to be issued before the worker has one. Raises ValueError with a sentence.
    """

    def __init__(self, cert: Path, key: Path, ca: Path) -> None:
        self._files = Reread([cert, key, ca], lambda: _contexts(cert, key, ca))

    @property
    def accepting(self) -> ssl.SSLContext:
        return self._files.value[0]

    @property
    def connecting(self) -> ssl.SSLContext:
        return self._files.value[1]


def peer_tls() -> PeerTls | None:
    """TLS as the environment demands it, if it does. Raises ValueError with the variables' names."""
    files = [Path(os.environ[name]) for name in (CERT, KEY, CA) if os.environ.get(name)]
    if not files:
        return None
    if len(files) < 3:
        raise ValueError(f"{CERT}, {KEY} and {CA}: set all three, or none")
    try:
        return PeerTls(*files)
    except ValueError as error:
        raise ValueError(f"{CERT}, {KEY}, {CA}: {error}") from error


def _contexts(cert: Path, key: Path, ca: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The one that accepts, and the one that connects."""
    accepting, connecting = server_context(cert, key, ca), client_context(ca, cert, key)
    accepting.num_tickets = 0  # sessions are never resumed
    connecting.check_hostname = False
    # Shake hands with oneself: what no peer would accept is found at the start.
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = connecting.wrap_bio(back, there), accepting.wrap_bio(there, back, server_side=True)
    try:
        for end in ends * _ROUND_TRIPS:
            with contextlib.suppress(ssl.SSLWantReadError):  # it is the other's turn
                end.do_handshake()
    except ssl.SSLError as error:
        raise ValueError(f"{cert} is not valid for the authority {ca}: {reason(error)}") from None
    return accepting, connecting
