"""The cache transceiver for each name, with and without UCX."""

import logging
import sys

import pytest

from tests.certificates import shared_peer
from tests.kv_peer import needs_nixl, place_of
from workers.kv.memory import host_memory
from workers.kv.transceiver import CacheTransceiver, choose_transceiver


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which NIXL cannot be imported."""
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    for name in [name for name in sys.modules if name.startswith("nixl_cu13.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("workers.kv.direct", "workers.kv.direct", "workers.kv.ucx"):
        monkeypatch.delitem(sys.modules, name, raising=False)


async def host_of(transceiver: CacheTransceiver) -> str:
    """Where it listens."""
    await transceiver.start()
    ticket = transceiver.offer(host_memory(bytearray(1)))
    await transceiver.close()
    return place_of(ticket)[0]


@pytest.mark.usefixtures("without_nixl")
async def test_without_nixl_the_default_is_tcp_and_says_why_and_ucx_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = choose_transceiver("DEFAULT", host="127.0.0.2")
    assert chosen.transport_name == "tcp"
    assert "nixl_cu13" in caplog.text
    assert await host_of(chosen) == "127.0.0.2"
    assert choose_transceiver("TCP").transport_name == "tcp"
    with pytest.raises(ImportError):
        choose_transceiver("UCX")


@needs_nixl
def test_where_ucx_does_not_start_the_default_is_tcp_and_ucx_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_agent: object, host: str) -> None:
        raise OSError(f"no device for {host}")

    monkeypatch.setattr("workers.kv.ucx.Agent.__init__", fails)
    assert choose_transceiver("DEFAULT", host="127.0.0.2").transport_name == "tcp"
    assert "no device for 127.0.0.2" in caplog.text
    with pytest.raises(OSError, match="no device"):
        choose_transceiver("UCX")


@pytest.mark.usefixtures("shared_authority")
def test_with_tls_the_default_is_tcp_and_ucx_is_refused() -> None:
    tls = shared_peer()
    assert choose_transceiver("DEFAULT", tls=tls).transport_name == "tcp+tls"
    assert choose_transceiver("TCP", tls=tls).transport_name == "tcp+tls"
    with pytest.raises(OSError, match="it has no TLS, which BATON_PEER_CERT asks for"):
        choose_transceiver("UCX", tls=tls)
