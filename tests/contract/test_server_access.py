"""Access to real etcd and NATS servers, closed ports, and what is neither; it never waits for ever."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.connect import Wires
from baton.tls import CredentialError
from tests.certificates import Authority
from tests.conftest import LaunchServer, free_port
from tests.registry import etcd_api
from tests.waiting import PATIENCE_S


async def ask(etcd: str, nats: str) -> None:
    await Wires(etcd_endpoints=etcd, nats_server=nats).check_access()


async def test_servers_that_answer_are_no_problem(etcd_server: str, nats_server: str) -> None:
    await ask(etcd_server, nats_server)


async def test_etcd_gets_the_login_of_the_environment(
    launch_etcd: LaunchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = launch_etcd().url
    etcd_api(url, "auth/user/add", name="root", password="sesame")
    etcd_api(url, "auth/user/grant", user="root", role="root")
    etcd_api(url, "auth/enable")
    wires = Wires(etcd_endpoints=url)
    with pytest.raises(CredentialError, match="set ETCD_AUTH_USERNAME"):
        await wires.check_access()
    monkeypatch.setenv("ETCD_AUTH_USERNAME", "root")
    monkeypatch.setenv("ETCD_AUTH_PASSWORD", "sesame")
    await wires.check_access()


async def test_etcd_gets_the_certificate_of_the_environment(
    launch_etcd: LaunchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    server, own = authority.sign("server"), authority.sign("client")
    flags = [f"--cert-file={server.cert}", f"--key-file={server.key}"]
    flags += [f"--trusted-ca-file={authority.ca}", "--client-cert-auth"]
    url = launch_etcd(*flags, scheme="https").url
    monkeypatch.setenv("ETCD_AUTH_CA", str(authority.ca))
    monkeypatch.setenv("ETCD_AUTH_CLIENT_CERT", str(own.cert))
    monkeypatch.setenv("ETCD_AUTH_CLIENT_KEY", str(own.key))
    discovery = Wires(etcd_endpoints=url).discovery()
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(discovery.watch()) as snapshots:
        assert not await anext(snapshots)
    await discovery.close()


async def test_servers_that_are_away_or_swapped_refuse_nobody(etcd_server: str, nats_server: str) -> None:
    closed = free_port()
    await ask(f"http://127.0.0.1:{closed}", f"nats://u:sesame@127.0.0.1:{closed}")
    await ask(nats_server.replace("nats", "http"), etcd_server.replace("http", "nats"))


@contextlib.contextmanager
def _server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where each connection is served by `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


async def test_a_server_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(600):
                connection.sendall(b"I")
                time.sleep(0.1)  # a server that drips is the fault under test
            has_ended.set()

    monkeypatch.setattr("baton.connect.ACCESS_S", 1.0)
    with _server(drip) as port:
        await ask(f"http://127.0.0.1:{port}", f"nats://127.0.0.1:{port}")
        assert not has_ended.is_set()


_JSON = st.sampled_from([b"{}", b"[]", b"null", b'{"max_payload": "x"}', b'{"version": 7}', b"{"])


@settings(max_examples=20, deadline=None)
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
        asyncio.run(ask(f"http://127.0.0.1:{port}", f"nats://127.0.0.1:{port}"))
