"""Real servers for the tests: etcd and NATS on free loopback ports, with their data in temporary folders."""

import gc
import inspect
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.certificates import SHARED, Authority
from tests.waiting import PATIENCE_S, scaled, signal_process

# Two busy cores are slow at times, which is not a failure.
_num = int(os.environ.get("BATON_FUZZ_EXAMPLES", "100"))
settings.register_profile(
    "here", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_num
)
settings.load_profile("here")
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs of a background job would ignore it

# httpx's default timeout is 5 s.
_httpx_default: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_httpx_default.connect = _httpx_default.read = _httpx_default.write = _httpx_default.pool = PATIENCE_S


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scale the test timeout for slow machines, unless it is set on the command line."""
    if config.getoption("timeout", default=None) is None:
        config.option.timeout = scaled(float(config.getini("timeout")))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Scale timeouts that tests set themselves."""
    for mark in item.iter_markers("timeout"):
        item.add_marker(pytest.mark.timeout(scaled(mark.args[0])), append=False)
        return


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread each folder's files over the whole run: contract tests mostly wait, the others compute."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        folders.setdefault(path.parent, []).append(path)
    place = {path: (i + 0.5) / len(files) for files in folders.values() for i, path in enumerate(files)}
    items.sort(key=lambda item: (place[item.path], item.path))


# They use the same stack of embedded workers, which each process of pytest's would start.
DEMO_FILES = frozenset(
    f"tests/system/test_{name}.py"
    for name in ("balancer", "examples", "gpt_oss_clients", "openai_sdk", "serving")
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with DEMO_FILES as one file."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415  the clients' venv has none

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "demo" if file in DEMO_FILES else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def free_port() -> int:
    """A free port below the ephemeral range, so that it stays free while its server is down."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class ServerProcess:
    """A real server that tests may kill, freeze and restart; it keeps its port and data."""

    def __init__(self, command: list[str], url: str, data: Path, *, ready: bytes) -> None:
        self.url = url
        self.data = data
        self._command = command
        self._ready = ready
        self._log = data.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until its log says that it is ready; fails the test otherwise."""
        with self._log.open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and self._process.poll() is None:
            if self._ready in self._log.read_bytes()[before:]:
                return
            time.sleep(0.01)  # poll: log files do not notify
        self.kill()
        pytest.fail(f"{self._command[0]} does not start: {self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL; does nothing if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: it keeps its sockets and does not respond."""
        assert self._process is not None
        signal_process(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


LaunchServer = Callable[..., ServerProcess]
"""Starts a server with extra command-line arguments (`scheme="https"`: etcd with TLS)."""


def binary(name: str, package: str) -> str:
    """Its path; fails the test if the package is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is not on the PATH: apt-get install {package}")
    return path


@pytest.fixture(scope="session")
def _servers() -> Iterator[list[ServerProcess]]:
    """Every started server; killed at the end of the session."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def launch_etcd(_servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> LaunchServer:
    """Starts an etcd for one test; see `LaunchServer`."""

    def launch(*extra: str, scheme: str = "http") -> ServerProcess:
        data, port, peer = tmp_path_factory.mktemp("etcd") / "data", free_port(), free_port()
        url, peer_url = f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        command = [binary("etcd", "etcd-server"), f"--data-dir={data}"]
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
    """Starts a nats-server for one test; see `LaunchServer`."""

    def launch(*extra: str) -> ServerProcess:
        data, port = tmp_path_factory.mktemp("nats") / "data", free_port()
        command = [binary("nats-server", "nats-server"), "-a", "127.0.0.1", "-p", str(port), *extra]
        server = ServerProcess(command, f"nats://127.0.0.1:{port}", data, ready=b"Server is ready")
        _servers.append(server)
        server.start()
        return server

    return launch


@pytest.fixture(scope="session")
def etcd_server(launch_etcd: LaunchServer) -> str:
    """URL of an etcd shared by the session: use unique keys, don't stop it."""
    return launch_etcd().url


@pytest.fixture
def own_etcd(launch_etcd: LaunchServer) -> Iterator[str]:
    """URL of an etcd for one test, without other tests' registrations."""
    server = launch_etcd()
    yield server.url
    server.kill()


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Restore os.environ after each test, so that later processes do not inherit changes."""
    before = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """Restore the root logger, which a process's `main` sets: kept records keep what they are about alive."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def shared_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one of `shared_peer`, also in processes that tests start."""
    folder = tmp_path_factory.mktemp("authority")
    authority = Authority(folder)
    authority.sign("peer")
    os.environ[SHARED] = str(folder)
    return authority


@pytest.fixture(scope="session")
def nats_server(launch_nats: LaunchServer) -> str:
    """URL of a nats-server shared by the session: use unique subjects, don't stop it."""
    return launch_nats().url


def pytest_collection_finish() -> None:
    """Keep what the tests' imports made out of garbage collections, which tests that look for leaks force."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random gpt-oss checkpoint, shared by the session: don't change it."""
    from tests.tiny_gpt_oss import write_checkpoint  # noqa: PLC0415  slow to load

    return write_checkpoint(tmp_path_factory.mktemp("tiny"))
