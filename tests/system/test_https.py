"""A frontend that serves HTTPS: streams, and a certificate that is renewed, in each process."""

import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.stack import MODEL, Stack
from tests.waiting import wait_for

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "stream": True}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Served:
    """A stack whose frontend has two processes and serves HTTPS."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.cert, self.key = authority.sign("server")
        tls = ("--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key))
        self.stack = Stack(folder)
        self.stack.url = self.stack.url.replace("http:", "https:")
        self.frontend = self.stack.frontend("--num-processes", "2", *tls)
        self.stack.worker("prefill"), self.stack.worker("decode")
        self.stack.wait_ready(1, 1)

    def stream(self, tls: ssl.SSLContext) -> str:
        """A whole stream, on a new connection."""
        return httpx.post(f"{self.stack.url}/v1/chat/completions", json=BODY, verify=tls).text

    def is_trusted(self, tls: ssl.SSLContext) -> bool:
        try:
            return httpx.get(f"{self.stack.url}/live", verify=tls).status_code == 200
        except httpx.ConnectError:
            return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("stack"), authority)
    with made.stack:
        yield made


def test_streams_come_over_https_only(served: Served, authority: Authority) -> None:
    for _ in range(4):
        assert served.stream(authority.client()).endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.TransportError):
        httpx.get(served.stack.url.replace("https:", "http:") + "/live")
    assert "listening address=https://" in served.frontend.text()


def test_a_renewed_certificate_is_used_by_every_process(served: Served, tmp_path: Path) -> None:
    another = Authority(tmp_path / "another")
    renewed = another.sign("server")
    served.key.write_bytes(renewed.key.read_bytes())
    served.cert.write_bytes(renewed.cert.read_bytes())
    wait_for(lambda: all(served.is_trusted(another.client()) for _ in range(4)))
    served.frontend.signal(signal.SIGTERM)
    assert served.frontend.wait() == 0
