"""The address that this process announces to its peers: chosen by the route to a server, and checked."""

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from baton.flags import without_secrets

AUTO = "auto"
"""As `--host`: the address from which this machine reaches the registry or the request plane."""


def own_address(servers: Sequence[str]) -> str:
    """The address from which this machine reaches the first of these URLs that it has a route to.

    IPv4 if there is a choice; loopback without URLs. Looks names up. Raises ValueError."""
    if not servers:
        return "127.0.0.1"
    problems = []
    for url in servers:
        try:
            return _route(url)
        except (OSError, ValueError) as error:
            problems.append(f"{without_secrets(url)}: {error}")
    raise ValueError(f"--host {AUTO}: no route to {'; '.join(problems)}; give this machine's address")


def _route(url: str) -> str:
    parts = urlsplit(url)
    places = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)
    problem = OSError("no address")
    for family, kind, _, _, place in sorted(places, key=lambda place: place[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                address: str = probe.getsockname()[0]
                return address
        except OSError as error:
            problem = error
    raise problem


def check_address(host: str) -> None:
    """Raise ValueError unless a process can listen on this address."""
    if why := why_not_bound(host, 0):
        raise ValueError(f"--host (BATON_HOST) {host!r}: {why}; give one address of this machine, or {AUTO}")


def why_not_bound(host: str, port: int) -> str | None:
    """Why no process can listen there now, or None. Port 0: any."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the frontend
            probe.bind((host, port))
            probe.listen()
    except (OSError, TypeError, ValueError) as error:  # also a name that cannot be encoded
        return (isinstance(error, OSError) and error.strerror) or str(error)
    return None
