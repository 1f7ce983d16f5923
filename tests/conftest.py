"""Real servers for the tests: etcd and NATS on free loopback ports, with their data in temporary folders."""

import inspect
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.waiting import PATIENCE_S, scaled

# Two busy cores are slow now and then; that is no finding.
settings.register_profile(
    "here",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("BATON_FUZZ_EXAMPLES", "100")),
)
settings.load_profile("here")

# httpx gives up after 5 s where nothing else is said.
_httpx_default: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_httpx_default.connect = _httpx_default.read = _httpx_default.write = _httpx_default.pool = PATIENCE_S


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test may take longer on a slow machine, unless the command line says how long."""
    if config.getoption("timeout", default=None) is None:
        config.option.timeout = scaled(float(config.getini("timeout")))


def pytest_itemcollected(item: pytest.Item) -> None:
    """The same for tests that say how long they may take."""
    for mark in item.iter_markers("timeout"):
        item.add_marker(pytest.mark.timeout(scaled(mark.args[0])), append=False)
        return


def free_port() -> int:
    """A port that nobody listens on, below the ephemeral range: nothing takes it while its server is down."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class ServerProcess:
    """One real server that a test may kill, freeze and start again; it keeps its port and its data."""

    def __init__(self, command: list[str], url: str, data: Path, *, ready: bytes) -> None:
        self.url = url
        self.data = data
        self._command = command
        self._ready = ready
        self._log = data.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until its log says that it serves; fails the test when it does not."""
        with self._log.open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and self._process.poll() is None:
            if self._ready in self._log.read_bytes()[before:]:
                return
            time.sleep(0.01)  # a log tells nobody that it grew
        self.kill()
        pytest.fail(f"{self._command[0]} does not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL; does nothing if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: it holds its sockets and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


LaunchServer = Callable[..., ServerProcess]
"""Starts a server; extra command line arguments are passed on (`scheme="https"`: etcd with TLS)."""


def _binary(name: str, package: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not on the PATH: apt-get install {package}")
    return path


@pytest.fixture(scope="session")
def _servers() -> Iterator[list[ServerProcess]]:
    """Every server that was started; killed at the end of the session."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def launch_etcd(_servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> LaunchServer:
    """Starts an etcd of the test's own; see `LaunchServer`."""

    def launch(*extra: str, scheme: str = "http") -> ServerProcess:
        data, port, peer = tmp_path_factory.mktemp("etcd") / "data", free_port(), free_port()
        url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        command = [_binary("etcd", "etcd-server"), f"--data-dir={data}"]
        command += [f"--listen-client-urls={url}", f"--advertise-client-urls={url}"]
        command += [f"--listen-peer-urls={peer_url}", f"--initial-advertise-peer-urls={peer_url}"]
        command += [f"--initial-cluster=default={peer_url}", *extra]
        server = ServerProcess(command, url, data, ready=b"ready to serve client requests")
        _servers.append(server)
        server.start()
        return server

    return launch


@pytest.fixture(scope="session")
def launch_nats(_servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> LaunchServer:
    """Starts a nats-server of the test's own; see `LaunchServer`."""

    def launch(*extra: str) -> ServerProcess:
        data, port = tmp_path_factory.mktemp("nats") / "data", free_port()
        command = [_binary("nats-server", "nats-server"), "-a", "127.0.0.1", "-p", str(port), *extra]
        server = ServerProcess(command, f"nats://127.0.0.1:{port}", data, ready=b"Server is ready")
        _servers.append(server)
        server.start()
        return server

    return launch


@pytest.fixture(scope="session")
def etcd_server(launch_etcd: LaunchServer) -> str:
    """URL of an etcd that the whole session shares: use keys of your own, don't stop it."""
    return launch_etcd().url


@pytest.fixture
def own_etcd(launch_etcd: LaunchServer) -> Iterator[str]:
    """URL of an etcd of the test's own: what other tests registered and killed is not in it."""
    server = launch_etcd()
    yield server.url
    server.kill()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """What a test sets in os.environ is not inherited by the processes of the next."""
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def nats_server(launch_nats: LaunchServer) -> str:
    """URL of a nats-server that the whole session shares: use subjects of your own, don't stop it."""
    return launch_nats().url
