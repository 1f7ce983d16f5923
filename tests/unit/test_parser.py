"""Requests that offer another protocol are read like those that do not."""

from typing import cast

import httptools
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontend.http.connection import Parser

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
NEXT = b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"GET /body HTTP/1.1\r\nhost: other\r\n\r\n"
CHUNKS = b"3\r\nGET\r\n2\r\n /\r\n0\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n%s"
REQUESTS = {
    "length": POST + b"content-length: 35\r\n\r\n" + BODY + NEXT,
    "chunks": POST + b"transfer-encoding: chunked\r\n\r\n" + CHUNKS + NEXT,
    "empty": POST + b"content-length: 0\r\n\r\n" + NEXT,
    "none": b"GET / HTTP/1.1\r\nhost: x\r\n%s\r\n" + NEXT,
    "two": (POST + b"content-length: 2\r\n\r\nab") * 2 + NEXT,
}


class Reader:
    """What uvicorn's protocol does with the calls, as (path, body) of each request that has ended."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.ended: list[tuple[bytes, bytes]] = []
        self.parser = Parser(cast("HttpToolsProtocol", self))  # what it needs of one

    def on_message_begin(self) -> None:
        self.headers, self._path, self._body = [], b"", b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self.parser.skips_body():
            self.ended.append((self._path, self._body))


def read(*parts: bytes) -> list[tuple[bytes, bytes]]:
    reader = Reader()
    for part in parts:
        reader.parser.feed_data(part)
    return reader.ended


@pytest.mark.parametrize("said", REQUESTS.values(), ids=REQUESTS)
def test_an_offer_of_another_protocol_changes_nothing_wherever_the_data_is_cut(said: bytes) -> None:
    offered = said.replace(b"%s", OFFER)
    expected = read(said.replace(b"%s", b""))
    assert expected[-1] == (b"/next", b"")
    assert [read(offered[:i], offered[i:]) for i in range(len(offered))] == [expected] * len(offered)
    assert read(*(bytes([byte]) for byte in offered)) == expected


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -5\r\n",
        b"transfer-encoding: chunked, identity\r\n",
    ],
)
def test_an_ambiguous_length_is_refused_with_an_offer_too(framing: bytes) -> None:
    for offer in b"", OFFER:
        with pytest.raises(httptools.HttpParserError):
            read(b"POST / HTTP/1.1\r\nhost: x\r\n" + offer + framing + b"\r\nhello")
