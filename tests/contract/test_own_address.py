"""The address that a process announces: that of the route to a server, and one of this machine."""

import socket
from pathlib import Path
from typing import Any

import pytest

from baton.connect import Wires
from baton.own_address import own_address
from workers.__main__ import main


@pytest.mark.parametrize(
    ("servers", "address"),
    [
        ([], "127.0.0.1"),
        (["http://127.0.0.1:2379"], "127.0.0.1"),
        (["http://localhost:2379"], "127.0.0.1"),  # ::1 too
        (["http://[::1]:2379"], "::1"),
        (["http://no..name:2379", "nats://user:word@127.0.0.1"], "127.0.0.1"),
    ],
)
def test_it_is_that_of_the_route_to_the_first_server(servers: list[str], address: str) -> None:
    assert own_address(servers) == address


def test_a_server_may_have_an_address_without_a_route_beside_one_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [(socket.AF_INET6, ("::1", 1)), (socket.AF_INET, ("255.255.255.255", 1))]  # for broadcasts only
    found = [(family, socket.SOCK_DGRAM, 0, "", place) for family, place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert own_address(["http://etcd:2379"]) == "::1"


def test_without_a_route_it_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"no route to http://no..name:1: .*; give this machine"):
        own_address(["http://no..name:1"])


@pytest.mark.parametrize(
    ("flags", "address"),
    [
        ({"host": "127.0.0.2"}, "127.0.0.2"),
        ({"host": "auto", "discovery_backend": "file", "request_plane": "tcp"}, "127.0.0.1"),
        ({"host": "auto", "discovery_backend": "etcd", "etcd_endpoints": "http://[::1]:1"}, "::1"),
        ({"host": "auto", "request_plane": "nats", "nats_server": "[::1]:1"}, "::1"),
    ],
)
def test_auto_is_by_the_servers_that_this_process_uses(flags: dict[str, Any], address: str) -> None:
    assert Wires(**flags).address() == address


@pytest.mark.parametrize("host", ["fd00:beef::5 172.29.0.5", "172.29.0.5 10.0.0.1", "192.0.2.1"])
def test_a_worker_that_peers_cannot_reach_ends_before_it_loads_a_model(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_HOST", host)
    monkeypatch.setenv("BATON_FILE_REGISTRY", str(tmp_path / "registry"))
    assert main(["--engine", "mocker", "--model-path", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith(f"error: --host (BATON_HOST) {host!r}: ")
    assert line.endswith("; give one address of this machine, or auto")
