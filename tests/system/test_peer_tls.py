"""A fleet whose processes demand certificates of each other: it serves as without, and lets no other in."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from baton.messages import WorkerInfo
from tests.answers import ENDLESS, Stream, whole_answer
from tests.certificates import Authority
from tests.conftest import free_port
from tests.stack import Process, Stack, running_stack
from tests.waiting import PATIENCE_S, scaled, wait_for

FOREIGN = "its certificate is not valid for this process's authority"


class Fleet(Stack):
    """Each process gets a certificate of its own."""

    def __init__(self, folder: Path, authority: Authority, engine: str) -> None:
        super().__init__(folder)
        self.engine = engine
        self._authority = authority
        self._plain = self.environ

    def start(self, name: str, module: str, *arguments: str) -> Process:
        self.environ = self._plain | self._authority.environ(name)
        return super().start(name, module, *arguments)

    def intruder(self, name: str, module: str, environ: dict[str, str], *arguments: str) -> Process:
        """A process that finds this fleet in the registry, and has only these variables."""
        self.environ = self._plain | environ
        return super().start(name, module, *arguments)

    def addresses(self) -> list[str]:
        files = Path(self.environ["BATON_FILE_REGISTRY"]).glob("*.json")
        return [msgspec.json.decode(file.read_bytes(), type=WorkerInfo).address for file in files]


@pytest.fixture(scope="module", params=["mocker", pytest.param("embedded", marks=pytest.mark.slow)])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), authority, request.param)
    fleet.frontend()
    for name in ("prefill", "decode-a", "decode-b"):
        fleet.worker(name.partition("-")[0], engine=fleet.engine, name=name)
    fleet.wait_ready(1, 2)
    yield fleet
    fleet.stop()


def test_answers_are_those_of_a_fleet_without_tls(fleet: Fleet, tmp_path: Path) -> None:
    with running_stack(tmp_path, fleet.engine) as plain:
        assert whole_answer(fleet) == whole_answer(plain)
    assert {urlsplit(address).scheme for address in fleet.addresses()} == {"tls"}
    assert {instance["kv_transfer"] for instance in fleet.health()["instances"]} == {"tcp+tls"}
    assert fleet.gauge("baton_handoffs_total") > 0
    assert fleet.gauge("baton_worker_unauthenticated_messages_total") == 0


def test_others_are_refused_with_a_reason_while_streams_go_on(fleet: Fleet, tmp_path: Path) -> None:
    expected, running = whole_answer(fleet), Stream(fleet, ENDLESS).read(3)
    foreign = Authority(tmp_path / "foreign").environ("foreign")
    for reason in refused_by(fleet, "plain-frontend", {}):
        assert reason.endswith("uses TLS, and this process does not (BATON_PEER_CERT is not set)")
    for reason in refused_by(fleet, "foreign-frontend", foreign):
        assert FOREIGN in reason

    for address in fleet.addresses():
        assert everything_received(address) == b""

    worker = ("--engine", "mocker", "--model-path", "models/demo", "--disaggregation-mode", "decode")
    intruders = [
        fleet.intruder(f"{name}-worker", "workers", environ, *worker)
        for name, environ in (("plain", {}), ("foreign", foreign))
    ]
    wait_for(lambda: len(fleet.health()["refused"]) == 2)
    plain, foreign = sorted(fleet.health()["refused"], key=lambda reason: "valid" in reason)
    assert plain.endswith("does not use TLS, and this process does (BATON_PEER_CERT)")
    assert FOREIGN in foreign
    assert fleet.processes[0].text().count("worker refused worker=") == 2

    running.read(100)
    assert (running.finish_reason, running.error) == (None, None)
    running.close()
    assert whole_answer(fleet) == expected
    assert fleet.gauge("baton_worker_unauthenticated_messages_total") >= 3
    for intruder in intruders:
        intruder.kill()
    wait_for(lambda: not fleet.health()["refused"])


def refused_by(fleet: Fleet, name: str, environ: dict[str, str]) -> list[str]:
    """Why a frontend that is not of the fleet gets no worker, as its /health says."""
    port = free_port()
    frontend = fleet.intruder(name, "frontend", environ, "--http-port", str(port))
    found: list[str] = []

    def has_reasons() -> bool:
        with suppress(httpx.TransportError):
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).json()
            assert health["status"] == "unhealthy"
            found[:] = health["refused"]
        return len(found) == 3

    wait_for(has_reasons)
    frontend.kill()
    return found


def everything_received(address: str) -> bytes:
    """What a worker sends to a caller with its address and name, but without a certificate."""
    place = urlsplit(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    received = b""
    with (
        suppress(OSError),
        socket.create_connection((place.hostname, place.port), scaled(10)) as sock,
        context.wrap_socket(sock) as wrapped,
    ):
        wrapped.sendall(place.path.encode())
        received = wrapped.recv(4096)
    return received
