"""Doctor knocks at real etcd and NATS servers, at closed ports, and at what is neither."""

import socket

from baton.doctor.probe_services import probe_etcd, probe_nats
from tests.conftest import LaunchServer


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_etcd_answers_with_latency_and_clock(etcd_server: str) -> None:
    service = probe_etcd(etcd_server)
    assert service.problem is None
    assert 0 < service.latency_s < 1
    assert service.clock_ahead_s is not None
    assert abs(service.clock_ahead_s) < 5


def test_nats_answers_with_latency_and_payload(launch_nats: LaunchServer) -> None:
    service = probe_nats(launch_nats("--user", "u", "--pass", "p").url)
    assert service.problem is None  # its credentials are the processes' own matter
    service = probe_nats(launch_nats().url)
    assert service.problem is None
    assert 0 < service.latency_s < 1
    assert service.max_payload_bytes == 1_048_576


def test_a_closed_port_is_told_by_name() -> None:
    port = _closed_port()
    assert probe_etcd(f"http://127.0.0.1:{port}").problem == "Connection refused"
    assert probe_nats(f"nats://127.0.0.1:{port}").problem == "Connection refused"


def test_swapped_addresses_are_told(etcd_server: str, nats_server: str) -> None:
    assert probe_nats(etcd_server.replace("http", "nats")).problem
    assert probe_etcd(nats_server.replace("nats", "http")).problem


def test_addresses_that_are_none_are_told() -> None:
    assert probe_etcd("127.0.0.1:2379").problem
    assert probe_etcd("file:///etc/passwd").problem
    assert probe_nats("nats://127.0.0.1:99999").problem
    assert probe_nats("").problem
