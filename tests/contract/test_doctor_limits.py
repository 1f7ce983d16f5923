"""Doctor's questions to etcd and NATS have limits: of time, of bytes, and of what it prints."""

import contextlib
import itertools
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from operations.doctor import probe_services as probing
from operations.doctor.facts import Service
from operations.doctor.probe_services import probe_etcd, probe_nats, probe_services
from tests.certificates import Authority
from tests.conftest import free_port
from tests.waiting import PATIENCE_S, wait_for

PONGS = b"PONG\r\n" * 3


@contextlib.contextmanager
def saying(said: bytes, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A port where each connection is told this, and stays open unless it is a page."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.ExitStack() as open_ones:
                while True:
                    try:
                        peer = open_ones.enter_context(listener.accept()[0])
                    except OSError:
                        return  # the end of the test
                    with contextlib.suppress(OSError):
                        answer(open_ones.enter_context(tls.wrap_socket(peer, True)) if tls else peer)

        def answer(peer: socket.socket) -> None:
            if said.startswith(b"HTTP"):
                peer.recv(1 << 16)
            peer.sendall(said)
            if said.startswith(b"HTTP"):
                peer.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE_S)


def page(body: object) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(body).encode()


def info(**fields: object) -> bytes:
    return b"INFO " + json.dumps(fields).encode() + b"\r\n"


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_TIMEOUT_S", 0.05)
    with saying(b"") as port:
        assert probe_etcd(f"http://127.0.0.1:{port}").problem
        assert probe_nats(f"nats://127.0.0.1:{port}").problem


def test_all_probes_together_have_one_limit_and_outlive_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.chain([0.0], itertools.repeat(PATIENCE_S))
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    may_end = threading.Event()
    threads: list[threading.Thread] = []

    def hangs(url: str) -> Service:
        threads.append(threading.current_thread())
        may_end.wait(PATIENCE_S)
        return Service(name="etcd", url=url)

    told = probe_services([(hangs, "a"), (hangs, "nats://u:sesame@b")], timeout_s=PATIENCE_S)
    assert [service.problem for service in told] == [f"no answer in {PATIENCE_S:.0f} s"] * 2
    assert told[1].url == "nats://***@b"  # it is printed
    wait_for(lambda: len(threads) == 2)
    assert [thread.daemon for thread in threads] == [True, True]
    may_end.set()
    for thread in threads:
        thread.join()


def test_the_best_of_three_answers_is_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe, url, said in ((probe_etcd, "http", page({})), (probe_nats, "nats", info() + PONGS)):
        now_s = iter((0.0, 5.0, 10.0, 11.0, 20.0, 23.0))
        monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=now_s.__next__, time=lambda: 0.0))
        with saying(said) as port:
            service = probe(f"{url}://127.0.0.1:{port}")
        assert (service.problem, service.latency_s) == (None, 1.0)


def test_an_endless_answer_is_read_to_a_limit() -> None:
    long = "x" * (1 << 17)
    with saying(info(version=long) + PONGS) as port:
        assert probe_nats(f"nats://127.0.0.1:{port}").problem
    with saying(page({"version": long})) as port:
        assert probe_etcd(f"http://127.0.0.1:{port}").problem


def test_a_nats_that_wants_tls_is_there_and_gets_no_login_in_clear() -> None:
    with saying(info(version="2.11.1", tls_required=True, max_payload=5)) as port:
        service = probe_nats(f"nats://u:sesame@127.0.0.1:{port}")
    assert (service.problem, service.refusal) == (None, None)
    assert (service.version, service.max_payload_bytes) == ((2, 11, 1), 5)


def test_etcd_is_asked_with_the_certificate_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    server, own = authority.sign("server"), authority.sign("client")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*server)
    context.load_verify_locations(authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    with saying(page({"etcdserver": "3.5.9"}), tls=context) as port:
        url = f"https://127.0.0.1:{port}"
        assert probe_etcd(url).problem
        monkeypatch.setenv("ETCD_AUTH_CA", str(authority.ca))
        assert probe_etcd(url).problem
        monkeypatch.setenv("ETCD_AUTH_CLIENT_CERT", str(own.cert))
        monkeypatch.setenv("ETCD_AUTH_CLIENT_KEY", str(own.key))
        service = probe_etcd(url)
    assert (service.problem, service.version) == (None, (3, 5, 9))


def test_a_question_takes_less_than_all_of_them_may() -> None:
    assert 1 <= probing._TIMEOUT_S < probing._WHOLE_TIMEOUT_S <= 30  # noqa: SLF001  the limits themselves


@pytest.mark.parametrize("said", [b"+OK\r\n", b""])
def test_a_nats_that_does_not_answer_a_ping_has_a_problem(
    said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_TIMEOUT_S", PATIENCE_S if said else 0.05)
    with saying(info() + said) as port:
        assert probe_nats(f"nats://127.0.0.1:{port}").problem


def test_a_password_is_not_printed_with_a_problem() -> None:
    for url in (f"nats://u:sesame@127.0.0.1:{free_port()}", "nats://u:sesame@:4222"):
        service = probe_nats(url)
        assert service.problem
        assert "sesame" not in service.url + service.problem
