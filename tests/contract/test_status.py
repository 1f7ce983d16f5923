"""`python -m baton status` asks its own frontend, whatever proxy variables say, and shows every worker."""

import os
import socket
import subprocess
import sys

import msgspec

from baton.messages import Role
from frontend.routing.health import Health, Instance
from tests.waiting import PATIENCE_S

CLOSED_PORT = "http://127.0.0.1:9"
EMPTY = Health(
    status="healthy", endpoints=[], instances=[], missing=[], warming=[], lost=[], cold_pairs=[],
    refused_pairs=[],
)  # fmt: skip
LIVE = Instance(
    worker_id="decode-1", role=Role.DECODE, endpoint="dyn://a.b.c", model="m", engine="mocker",
    engine_version="1", kv_transfer="tcp",
)  # fmt: skip


def ask(health: Health, *flags: str, answer: bytes = b"200 OK") -> tuple[int, list[str]]:
    """Exit status and lines of `status` where the frontend says this."""
    with socket.create_server(("127.0.0.1", 0)) as frontend:
        frontend.settimeout(30)
        url = f"http://127.0.0.1:{frontend.getsockname()[1]}"
        command = [sys.executable, "-m", "baton", "status", "--url", url, *flags]
        environment = os.environ | {"http_proxy": CLOSED_PORT, "HTTP_PROXY": CLOSED_PORT, "no_proxy": ""}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as asking:
            connection, _ = frontend.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.0 %b\r\n\r\n" % answer + msgspec.json.encode(health))
            said, _ = asking.communicate(timeout=PATIENCE_S)
    return asking.returncode, said.splitlines()


def test_status_asks_no_proxy() -> None:
    assert ask(EMPTY) == (0, ["healthy: 0 prefill, 0 decode"])


def test_a_frontend_that_cannot_serve_yet_says_what_is_missing() -> None:
    health = msgspec.structs.replace(EMPTY, status="unhealthy", missing=["prefill", "decode"])
    said = ask(health, answer=b"503 Service Unavailable")
    assert said == (1, ["unhealthy: 0 prefill, 0 decode", "missing prefill", "missing decode"])


def test_status_shows_the_workers_that_do_not_answer_too() -> None:
    health = msgspec.structs.replace(
        EMPTY,
        instances=[LIVE],
        warming=["decode-2"],
        lost=["prefill-1", "prefill-2"],
        cut_pairs=["p -> d"],
        stuck=["decode-3"],
    )

    assert ask(health, "--brief") == (0, ["0 prefill, 1 decode, 1 warming, 2 lost, 1 stuck"])
    assert ask(health) == (
        0,
        [
            "healthy: 0 prefill, 1 decode, 1 warming, 2 lost, 1 stuck",
            "decode-1  decode  m  mocker  tcp",
            "decode-2  warming",
            "prefill-1  lost",
            "prefill-2  lost",
            "decode-3  stuck",
            "cut pair p -> d",
        ],
    )
