"""Doctor knocks at real etcd and NATS servers, at closed ports, and at what is neither."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connect import Wires
from operations.doctor.command import DoctorSettings, gather
from operations.doctor.probe_services import probe_etcd, probe_nats, probe_services
from tests.conftest import LaunchServer, free_port
from tests.registry import etcd_api


def test_etcd_answers_with_latency_clock_and_version(etcd_server: str) -> None:
    service = probe_etcd(etcd_server)
    assert service.problem is None
    assert 0 < service.latency_s < 1
    assert service.clock_ahead_s is not None
    assert abs(service.clock_ahead_s) < 5
    assert service.version >= (3, 4)


def test_nats_answers_with_latency_payload_and_version(launch_nats: LaunchServer) -> None:
    service = probe_nats(launch_nats().url)
    assert (service.problem, service.refusal) == (None, None)
    assert 0 < service.latency_s < 1
    assert service.max_payload_bytes == 1_048_576
    assert service.version >= (2, 9)


def test_nats_lets_in_who_has_the_password(
    launch_nats: LaunchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = launch_nats("--user", "u", "--pass", "p:w").url
    assert probe_nats(url).refusal == "Authorization Violation"
    assert probe_nats(url.replace("//", "//u:wrong@")).refusal == "Authorization Violation"
    service = probe_nats(url.replace("//", "//u:p%3Aw@"))
    assert (service.problem, service.refusal) == (None, None)
    assert service.url == url.replace("//", "//***@")  # it is printed
    monkeypatch.setenv("NATS_AUTH_USERNAME", "u")
    monkeypatch.setenv("NATS_AUTH_PASSWORD", "p:w")
    assert probe_nats(url).refusal is None
    assert probe_nats(url.replace("//", "//u:wrong@")).refusal is None  # as for nats-py
    monkeypatch.undo()
    token = launch_nats("--auth", "sesame").url
    assert probe_nats(token.replace("//", "//sesame@")).refusal is None


def denial(url: str) -> str | None:
    """What doctor finds about the login to etcd."""
    wires = Wires(discovery_backend="etcd", etcd_endpoints=url)
    return gather(DoctorSettings(wires=wires)).credential_problem


def test_etcd_lets_in_who_has_the_password(
    launch_etcd: LaunchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = launch_etcd().url
    etcd_api(url, "auth/user/add", name="root", password="sesame")
    etcd_api(url, "auth/user/grant", user="root", role="root")
    etcd_api(url, "auth/enable")
    assert "user name is empty" in (denial(url) or "")
    monkeypatch.setenv("ETCD_AUTH_USERNAME", "root")
    assert "authentication failed" in (denial(url) or "")
    monkeypatch.setenv("ETCD_AUTH_PASSWORD", "wrong")
    assert "authentication failed" in (denial(url) or "")
    monkeypatch.setenv("ETCD_AUTH_PASSWORD", "sesame")
    assert denial(url) is None


def test_credentials_for_an_etcd_that_asks_for_none_do_no_harm(
    etcd_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_AUTH_USERNAME", "root")
    assert denial(etcd_server) is None


def test_no_proxy_is_asked_for_etcd(etcd_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    assert probe_etcd(etcd_server).problem is None


def test_a_closed_port_is_told_by_name() -> None:
    port = free_port()
    assert probe_etcd(f"http://127.0.0.1:{port}").problem == "Connection refused"
    assert probe_nats(f"nats://127.0.0.1:{port}").problem == "Connection refused"


def test_swapped_addresses_are_told(etcd_server: str, nats_server: str) -> None:
    assert probe_nats(etcd_server.replace("http", "nats")).problem
    assert probe_etcd(nats_server.replace("nats", "http")).problem


NO_URLS = ["", "x", "127.0.0.1:2379", "file:///etc/passwd", "http://", "http://[::1", "nats://[::1"]
NO_URLS += ["nats://127.0.0.1:99999", "http://a b:1", "nats://\udcff"]


@pytest.mark.parametrize("url", NO_URLS)
def test_addresses_that_are_none_are_told(url: str) -> None:
    assert probe_etcd(url).problem
    assert probe_nats(url).problem


@contextlib.contextmanager
def _server(serve: Callable[[socket.socket], None], host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port where each connection is served by `serve`."""
    with socket.create_server((host, port)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_nats_is_asked_at_its_own_port_if_no_other_is_given() -> None:
    host = "127.66.0.1"  # this machine, where no other test listens
    with _server(lambda connection: connection.sendall(b"SSH-2.0\r\n"), host, 4222):
        assert probe_nats(f"nats://{host}").problem == "another program listens there: it sends no INFO"


def test_a_peer_that_drips_is_not_waited_for() -> None:
    was_heard_out = threading.Event()

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(600):
                connection.sendall(b"I")
                time.sleep(0.1)  # a server that drips is the fault under test
            was_heard_out.set()

    with _server(drip) as port:
        etcd, nats = probe_services(
            [(probe_etcd, f"http://127.0.0.1:{port}"), (probe_nats, f"nats://127.0.0.1:{port}")], timeout_s=1
        )
        assert not was_heard_out.is_set()
    assert etcd.problem
    assert nats.problem == "no answer in 1 s"


_JSON = st.sampled_from([b"{}", b"[]", b"null", b'{"max_payload": "x"}', b'{"version": 7}', b"{"])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([b"INFO ", b"HTTP/1.0 200 OK\r\nDate: x\r\n\r\n", b""]), _JSON | st.binary(max_size=40)
)
def test_no_answer_makes_the_probes_fail(head: bytes, body: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(head + body + b"\r\n")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    with _server(answer) as port:
        probe_etcd(f"http://127.0.0.1:{port}")
        probe_nats(f"nats://127.0.0.1:{port}")
