"""Picks the cache transceiver that the engine YAML names, or the best one this machine can run."""

import importlib
import logging

from workers.kv.tcp import TcpTransceiver
from workers.kv.transceiver import CacheTransceiver

log = logging.getLogger(__name__)


def choose_transceiver(backend: str, *, host: str = "127.0.0.1") -> CacheTransceiver:
    """The transceiver for `backend`: `UCX`, `TCP`, or `DEFAULT` (UCX if it runs here, else TCP); not started.

    `host` is the address to listen on, and at which other workers reach this one. Raises ImportError or
    OSError when UCX is insisted on and does not run, ValueError for an unknown name. May take a second.
    """
    if backend not in {"DEFAULT", "UCX", "TCP"}:
        raise ValueError(f"unknown KV transfer backend {backend!r}: use DEFAULT, UCX or TCP")
    if backend == "TCP":
        return TcpTransceiver(host)
    try:
        # Loaded here, not above: machines without UCX run the rest of this package.
        direct = importlib.import_module("workers.kv.direct")
        importlib.import_module("workers.kv.ucx").check(host)
    except (ImportError, OSError) as error:
        if backend == "UCX":
            raise
        log.warning("kv transfer=tcp reason=UCX does not run here: %s", error)
        return TcpTransceiver(host)
    transceiver: CacheTransceiver = direct.DirectTransceiver(host)
    return transceiver
