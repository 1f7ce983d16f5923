"""As much of pyzmq as one question to NIXL's side channel needs: messages over TCP, each after its length."""

import socket
from typing import Any
from urllib.parse import urlsplit

REQ, LINGER, RCVTIMEO, IPV6 = 3, 17, 27, 42


class ZMQError(Exception):
    """What pyzmq raises."""


class Again(ZMQError):
    """No answer within RCVTIMEO."""


class Context:
    """Its end waits for what its sockets have not sent, unless their LINGER says otherwise."""

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, *_: object) -> None:
        """See the class."""

    def socket(self, kind: int) -> "Socket":
        """A socket of this kind."""
        assert kind == REQ
        return Socket()


class Socket:
    """A REQ socket with one peer; a peer that is not there is no error."""

    def __init__(self) -> None:
        self._options: dict[int, int] = {LINGER: -1, RCVTIMEO: -1}
        self._peer: socket.socket | None = None

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        if self._peer is not None:
            self._peer.close()
        elif self._options[LINGER] != 0:
            raise AssertionError("it would wait forever for a peer that takes the message")

    def setsockopt(self, option: int, value: int) -> None:
        """Milliseconds; -1 is forever."""
        self._options[option] = value

    def connect(self, address: str) -> None:
        """Connect to tcp://host:port."""
        assert self._options.get(IPV6) == 1, "it would not reach a host by its IPv6 address"
        parts: Any = urlsplit(address)
        try:
            self._peer = socket.create_connection((parts.hostname, parts.port), timeout=60)
        except OSError:
            self._peer = None

    def send(self, message: bytes) -> None:
        """Send, or keep it for a peer that comes later."""
        if self._peer is not None:
            self._peer.sendall(len(message).to_bytes(4, "big") + message)

    def recv(self) -> bytes:
        """The answer. Raises Again after RCVTIMEO."""
        limit_ms = self._options[RCVTIMEO]
        assert limit_ms > 0, "it would wait forever for an answer"
        if self._peer is None:
            raise Again("Resource temporarily unavailable")
        self._peer.settimeout(limit_ms / 1000)
        try:
            num_bytes = int.from_bytes(self._peer.recv(4, socket.MSG_WAITALL), "big")
            return self._peer.recv(num_bytes, socket.MSG_WAITALL)
        except TimeoutError as error:
            raise Again("Resource temporarily unavailable") from error
