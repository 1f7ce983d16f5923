"""`python -m frontend` from arguments to exit status: which socket it listens on, and taking one over."""

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend import __main__ as frontend_main
from frontend.__main__ import _is_loopback, _port, main
from frontend.flags import FrontendSettings
from frontend.processes import takeover
from frontend.processes.takeover import Port
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "TAKE_TIMEOUT_S", PATIENCE_S)


@contextmanager
def running() -> Iterator[tuple[socket.socket, threading.Event]]:
    """A frontend that serves and passes its port on, and whether the next one serves."""
    listener, passed, opened = socket.create_server(("127.0.0.1", 0)), threading.Event(), threading.Event()
    end: list[Callable[[], object]] = []

    async def passing() -> None:
        task, loop = asyncio.ensure_future(Port(listener).passed_on()), asyncio.get_running_loop()
        task.add_done_callback(lambda _: None if task.cancelled() else passed.set())
        loop.call_soon(opened.set)  # after the task's first turn
        ended = asyncio.Event()
        end.append(lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        task.cancel()

    with listener, ThreadPoolExecutor(1) as thread:
        offered = thread.submit(asyncio.run, passing())
        assert opened.wait(PATIENCE_S)
        try:
            yield listener, passed
        finally:
            end[0]()
            offered.result(PATIENCE_S)


def is_offered(port: int) -> bool:
    taken = Port.taken(port)
    if taken is not None:
        taken.close()
    return taken is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"insecure": True},
        {"api_keys_file": Path("keys")},
        {"tls_cert_file": Path("c"), "tls_key_file": Path("k"), "tls_client_ca_file": Path("a")},
    ],
    ids=["insecure", "keys", "client certificates"],
)
def test_other_machines_are_served_if_their_clients_are_known_or_it_is_said_to_be_insecure(
    settings: dict[str, Any],
) -> None:
    with closing(_port(FrontendSettings(http_host="0.0.0.0", http_port=0, **settings))) as port:
        assert not _is_loopback(port.listener)
        assert port.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_https_alone_does_not_tell_who_a_client_is() -> None:
    tls: dict[str, Any] = {"tls_cert_file": Path("c"), "tls_key_file": Path("k")}
    with pytest.raises(ValueError, match="there are no API keys"):
        _port(FrontendSettings(http_host="0.0.0.0", http_port=0, **tls))


def test_this_machine_is_served_over_either_internet_protocol_and_unix_sockets(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "::1"):
        with closing(_port(FrontendSettings(http_host=host, http_port=0))) as port:
            assert port.listener.getsockname()[0] == host
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        assert _is_loopback(local)


def test_a_port_in_use_is_taken_over_only_if_that_is_said() -> None:
    with running() as (theirs, passed):
        number = theirs.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"cannot listen on 127.0.0.1:{number}: .*choose another --http-p"
        ):
            _port(FrontendSettings(http_port=number))
        with closing(_port(FrontendSettings(http_port=number, take_over=True))) as port:
            assert os.fstat(port.listener.fileno()).st_ino == os.fstat(theirs.fileno()).st_ino
        assert not passed.is_set()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused_by_its_flag(host: str) -> None:
    with pytest.raises(ValueError, match=f"cannot listen on {host}:0: .*; choose another --http-host"):
        _port(FrontendSettings(http_host=host, http_port=0))


def test_a_registry_that_others_can_write_to_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    assert main(["--http-port", "0", f"--file-registry={tmp_path}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.fixture
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a process sets for itself is as before after the test."""
    monkeypatch.setattr(frontend_main, "leave_start_uncollected", lambda: None)
    interval_s, descriptors = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.setswitchinterval(interval_s)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


@pytest.mark.usefixtures("_unchanged")
def test_the_next_frontend_serves_before_the_running_one_drains_and_offers_the_port_in_turn(
    tmp_path: Path,
) -> None:
    with running() as (theirs, drained), ThreadPoolExecutor(1) as thread:
        port, has_ended = theirs.getsockname()[1], threading.Event()

        def watch_it() -> None:
            try:
                assert drained.wait(PATIENCE_S / 3)
                wait_for(lambda: is_offered(port), 20.0)
                assert httpx.get(f"http://127.0.0.1:{port}/live", verify=False).status_code == 200
            finally:
                if not has_ended.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

        watched = thread.submit(watch_it)
        folder = f"--file-registry={tmp_path / 'registry'}"
        status = main(["--take-over", "--http-port", str(port), folder, "--response-store", ":memory:"])
        has_ended.set()
        watched.result(PATIENCE_S)
        assert status == 0
        assert not is_offered(port)
