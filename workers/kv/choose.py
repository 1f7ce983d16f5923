"""Selects the cache transceiver of the engine YAML, or the best one that this machine supports."""

import importlib
import logging

from baton.peer_tls import CERT, PeerTls
from workers.kv.plane import PlaneTransceiver
from workers.kv.transceiver import CacheTransceiver

log = logging.getLogger(__name__)


def choose_transceiver(
    backend: str, *, host: str = "127.0.0.1", tls: PeerTls | None = None
) -> CacheTransceiver:
    """The transceiver for `backend`, not started: `UCX`, `TCP`, or `DEFAULT` (UCX if available, else TCP).
    UCX has no TLS: with `tls` the default is TCP.

    `host` is the address to listen on and to announce. Raises ImportError or OSError if UCX is requested but
    unavailable, ValueError for an unknown name. May take a second.
    """
    if backend not in {"DEFAULT", "UCX", "TCP"}:
        raise ValueError(f"unknown KV transfer backend {backend!r}: allowed are DEFAULT, UCX, TCP")
    if backend == "UCX" and tls is not None:
        raise OSError(f"it has no TLS, which {CERT} asks for")
    if backend == "TCP" or tls is not None:
        return PlaneTransceiver(host, tls)
    try:
        # A lazy import, so that machines without UCX can use the rest of this package.
        direct = importlib.import_module("workers.kv.direct")
        importlib.import_module("workers.kv.ucx").check(host)
    except (ImportError, OSError) as error:
        if backend == "UCX":
            raise
        log.warning("kv transfer=tcp reason=UCX is unavailable: %s", error)
        return PlaneTransceiver(host)
    return PlaneTransceiver(host, direct=direct.Direct(host))
