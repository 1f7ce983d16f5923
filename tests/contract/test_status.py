"""`python -m baton status` asks its own frontend, whatever proxy variables say, and shows every worker."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import pytest
from msgspec.structs import replace

from baton.flags import parse
from baton.messages import Role
from frontend.routing.health import FleetEvent, Health, Instance
from frontend.snapshot import Point, Slow, Snapshot, WorkerView
from operations.client import Client, FrontendFlags
from operations.commands import main
from operations.errors import CommandError
from tests.waiting import PATIENCE_S

Look = Callable[..., tuple[int, list[str]]]
CLOSED_PORT = "http://127.0.0.1:9"
EMPTY = Health(
    status="healthy", endpoints=[], instances=[], missing=[], warming=[], lost=[], cold_pairs=[],
    refused_pairs=[],
)  # fmt: skip
TITLES = "WORKER     ROLE     STATE  RUNNING  WAITING          KV  AGE  HOST:PID"
EVENT = FleetEvent(at_s=0.0, kind="lost", what="prefill-0", detail="no heartbeat", lasted_s=2.0)
FLEET = Snapshot(
    at_s=0.0, models=["m"], tokens_per_s=1234.5, requests_per_s=2.0, refused_per_s=0.5, num_running=3,
    num_queued=1, stages={}, events=[EVENT],
    workers=[
        WorkerView(worker_id="d1", name="decode-0", role=Role.DECODE, state="ready", reason="", host="h",
                   pid=7, age_s=125.0, engine="mocker", places=4, num_running=2, num_waiting=1,
                   kv_used_blocks=3, kv_blocks=4),
        WorkerView(worker_id="p1", name="prefill-0", role=Role.PREFILL, state="lost", reason="no heartbeat",
                   host="", pid=0, age_s=1.0, engine="mocker", places=None),
    ],
    pairs=[],
    points=[Point(1, 0.05, 0.5, None, None), Point(2, None, None, 0.01, 0.02)],
    slowest=[Slow(request_id="a\x1b[2J", status=503, duration_s=4.08, stages={"kv_move": 4.0}, verdict="")],
)  # fmt: skip


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The port of a peer that gives one of these to each connection, in turn; after an empty one it waits."""
    with socket.create_server(("127.0.0.1", 0)) as peer:

        def serve() -> None:
            for answer in answers:
                connection, _ = peer.accept()
                with connection, suppress(ConnectionError):  # a reset by who read enough
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    if answer:
                        connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)  # until it is closed

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{peer.getsockname()[1]}"
        peer.shutdown(socket.SHUT_RDWR)  # it waits for no connection that does not come
        thread.join(PATIENCE_S)


def ok(body: object, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.0 %b\r\n\r\n%b" % (status, msgspec.json.encode(body))


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Look:
    """Exit status and lines of `status` where the frontend answers this, behind no proxy."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, CLOSED_PORT)
    monkeypatch.setenv("no_proxy", "")

    def run(*answers: bytes, flags: Sequence[str] = ()) -> tuple[int, list[str]]:
        with answering(*answers) as port:
            code = main(["status", "--url", port, *flags])
        printed = capsys.readouterr()
        assert printed.err == ""
        return code, [line.rstrip() for line in printed.out.splitlines()]

    return run


def test_status_shows_load_workers_and_the_slowest_requests_without_a_proxy(look: Look) -> None:
    code, lines = look(ok(EMPTY), ok(FLEET))
    assert (code, lines) == (0, [
        "healthy: 0 prefill, 0 decode",
        "3 running, 1 queued, 1,234 tokens/s, 2.0 requests/s, 0.5 refused/s",
        "TTFT p50 50 ms p99 500 ms, ITL p50 10 ms p99 20 ms",
        TITLES,
        "prefill-0  prefill  lost         -        -           -   1s  no heartbeat",
        "decode-0   decode   ready      2/4        1  ####.  75%   2m  h:7 mocker",
        "SLOWEST of the last five minutes",
        "    4.08 s  503  a\\x1b[2J  kv move 4.00",
        "EVENTS (UTC)",
        "01-01 00:00:00  prefill-0 lost after 2.0 s: no heartbeat",
    ])  # fmt: skip


DECODE = Instance(
    worker_id="w", role=Role.DECODE, endpoint="", model="m", engine="", engine_version="", kv_transfer="tcp"
)
TYPO = [
    replace(DECODE, role=Role.PREFILL),
    DECODE,
    replace(DECODE, model="typo"),
    replace(DECODE, model="aggregated", kv_transfer=""),
]
UNWELL = replace(
    EMPTY, instances=[DECODE], warming=["decode-2"],
    lost=["prefill-1", "prefill-2"], cut_pairs=["p -> d"], stuck=["decode-3"],
    refused=["decode-4: another model"], cold_pairs=["p -> e"], refused_pairs=["p -> f: block sizes"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("health", "answer", "first", "problems"),
    [
        (replace(EMPTY, status="unhealthy", missing=["prefill", "decode"]), b"503 Service Unavailable",
         "unhealthy: 0 prefill, 0 decode", ["missing prefill", "missing decode"]),
        (replace(EMPTY, instances=TYPO), b"200 OK", "healthy: 1 prefill, 3 decode",
         ["model typo has no prefill worker, other models have"]),
        (UNWELL, b"200 OK", "healthy: 0 prefill, 1 decode, 1 warming, 2 lost, 1 stuck",
         ["refused worker decode-4: another model", "cold pair p -> e", "cut pair p -> d",
          "refused pair p -> f: block sizes"]),
    ],
)  # fmt: skip
def test_status_names_each_problem_of_the_fleet(
    health: Health, answer: bytes, first: str, problems: list[str], look: Look
) -> None:
    code, lines = look(ok(health, answer), ok(FLEET))
    assert (code, lines[0]) == (int(health.status == "unhealthy"), first)
    assert lines[3 : lines.index(TITLES)] == problems


def test_brief_is_one_line(look: Look) -> None:
    counts = "0 prefill, 1 decode, 1 warming, 2 lost, 1 stuck"
    assert look(ok(UNWELL), flags=["--brief"]) == (0, [counts])


def test_figures_that_no_frontend_sends_end_in_no_traceback(look: Look) -> None:
    decode, prefill = FLEET.workers
    workers = [replace(decode, kv_used_blocks=1 << 60, kv_blocks=1), replace(prefill, age_s=-1e300)]
    strange = replace(FLEET, workers=workers, events=[replace(EVENT, at_s=1e300)])
    assert look(ok(EMPTY), ok(strange))[0] == 0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (ok(EMPTY), 0),
        (ok(EMPTY, b"404 Not Found"), 2),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", 2),
        (ok(replace(EMPTY, missing=["x" * (16 << 20)])), 2),
        (b"SSH-2.0-OpenSSH_9.6\r\n", 2),
        (b"", 2),
    ],
    ids=["frontend", "not found", "page", "endless", "not http", "silent"],
)
def test_what_is_no_frontend_shows_in_the_exit_status(
    answer: bytes, found: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as port:
        assert main(["status", "--brief", "--url", port]) == found
    assert ("no frontend answers at http://127.0.0.1" in capsys.readouterr().err) == (found == 2)


@pytest.mark.parametrize(
    "flags", [["--tls-cert-file", "/none.pem"], ["--tls-cert-file", __file__, "--tls-key-file", "/none"]]
)
def test_an_unreadable_certificate_is_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "https://127.0.0.1:9", *flags]) == 2
    assert f"{flags[1]} and {flags[-1]} are not a certificate and its key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "flags", "url"),
    [
        ({}, [], "http://127.0.0.1:8000"),
        ({"HTTP_PORT": "81"}, [], "http://127.0.0.1:81"),
        ({"HTTP_PORT": "81", "DYN_HTTP_PORT": "82"}, [], "http://127.0.0.1:82"),
        ({"HTTP_PORT": "none"}, ["--url", "localhost:9/"], "http://localhost:9"),
        ({}, ["--url", "83"], "http://127.0.0.1:83"),
        ({}, ["--url", "https://[::1]:9/baton/v1"], "https://[::1]:9/baton"),
    ],
)
def test_the_port_of_make_up_is_the_default(environ: dict[str, str], flags: list[str], url: str) -> None:
    flags_read = parse(FrontendFlags, flags, prog="x", description="", environ=environ).settings
    assert Client(flags_read).url == url


@pytest.mark.parametrize(
    ("environ", "flags", "names"),
    [
        ({"HTTP_PORT": "70000"}, [], "70000:"),
        ({"HTTP_PORT": "0"}, [], "0:"),
        ({}, ["--url", ""], ":"),
        ({}, ["--url", "file:///etc/passwd"], "file:///etc/passwd:"),
        ({}, ["--url", "http://me:secret@h:x"], "http://***@h:x:"),
        ({}, ["--url", "http://me:secret@h:1"], "http://***@h:1:"),
        ({}, ["--url", "http://h:1?x=y"], "http://h:1?x=y:"),
        ({}, ["--url", "http://h\r\nx: y"], r"http://h\r\nx: y:"),
        ({"BATON_API_KEY": "sk\r\nx: y"}, [], "the API key must"),
    ],
)
def test_a_wrong_address_is_one_sentence(environ: dict[str, str], flags: list[str], names: str) -> None:
    with pytest.raises(CommandError) as refused:
        Client(parse(FrontendFlags, flags, prog="x", description="", environ=environ).settings)
    assert str(refused.value).startswith(names)
