"""The cache transceiver for each name, with and without UCX."""

import logging
import sys

import pytest

from tests.certificates import shared_peer
from workers.kv.choose import choose_transceiver
from workers.kv.tcp import TcpTransceiver


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which NIXL cannot be imported."""
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    for name in [name for name in sys.modules if name.startswith("nixl_cu13.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("workers.kv.direct", "workers.kv.fabric", "workers.kv.ucx"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_tcp_is_plain_tcp() -> None:
    assert isinstance(choose_transceiver("TCP"), TcpTransceiver)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="DEFAULT, UCX, TCP"):
        choose_transceiver("MPI")


@pytest.mark.usefixtures("without_nixl")
def test_the_default_without_nixl_is_tcp_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_transceiver("DEFAULT"), TcpTransceiver)
    assert "nixl_cu13" in caplog.text


@pytest.mark.usefixtures("without_nixl")
def test_insisting_on_ucx_without_nixl_fails() -> None:
    with pytest.raises(ImportError):
        choose_transceiver("UCX")


@pytest.mark.usefixtures("shared_authority")
def test_with_tls_the_default_is_tcp_and_ucx_is_refused() -> None:
    tls = shared_peer()
    assert choose_transceiver("DEFAULT", tls=tls).transport_name == "tcp+tls"
    assert choose_transceiver("TCP", tls=tls).transport_name == "tcp+tls"
    with pytest.raises(OSError, match="it has no TLS, which BATON_PEER_CERT asks for"):
        choose_transceiver("UCX", tls=tls)


def test_tcp_refuses_device_memory() -> None:
    assert not choose_transceiver("TCP").moves_device_memory
