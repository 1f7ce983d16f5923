"""Parses the requests of a connection; `Upgrade` is ignored, as HTTP allows."""

from collections.abc import Callable

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Parser:
    """An `httptools.HttpRequestParser` for uvicorn's protocol.

    The library takes what follows the head of a request with `Upgrade` (or `CONNECT`) for another protocol.
    Here it is the body and then the next request: Java's client and `curl --http2` offer h2c with their
    first POST.
    """

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self._parser = _parser(protocol)

    def get_http_version(self) -> str:
        """See httptools."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """See httptools."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """See httptools."""
        return self._parser.should_keep_alive()

    def feed_data(self, data: bytes) -> None:
        """Parse data. Raises httptools.HttpParserError."""
        while data:
            try:
                self._parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self.skips_body():
                    self._begin_body()

    def should_upgrade(self) -> bool:
        """False."""
        return False

    def skips_body(self) -> bool:
        """Whether the library takes the current request, whose head is complete, for one without a body."""
        framing = [pair for pair in self._protocol.headers if pair[0] in _FRAMING]
        return self._parser.should_upgrade() and any(value.strip(b"0") for _, value in framing)

    def _begin_body(self) -> None:
        """Continue with a parser that has read a head with the same body, but without `Upgrade`."""
        framing = [name + b": " + value for name, value in self._protocol.headers if name in _FRAMING]
        muted = _Muted(self._protocol)
        self._parser = _parser(muted)
        self._parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *framing, b"", b""]))
        muted.is_muted = False


def _parser(protocol: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: it is not read
    return parser


class _Muted:
    """Passes a parser's calls on to the protocol, unless it is muted."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self.is_muted = True
        self._protocol = protocol

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = getattr(self._protocol, name)

        def called(*given: bytes) -> None:
            if not self.is_muted:
                call(*given)

        return called
