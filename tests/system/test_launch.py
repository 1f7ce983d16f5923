"""`launch/local.sh` for a new user: ready in one line, stopped without a trace, clear errors."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.launched import MOCKER, Launch
from tests.stack import MODEL
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.popen.terminate()
        launch.popen.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("arguments", [(), ("--cluster",)])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_ready_serves_and_leaves_nothing_behind(
    launches: list[Launch], tmp_path: Path, arguments: tuple[str, ...], stop: signal.Signals
) -> None:
    if arguments and not (shutil.which("etcd") and shutil.which("nats-server")):
        pytest.fail("etcd and nats-server must be on the PATH: make servers")
    of_the_script = {"PREFILL_ENGINE_ARGS": "", "DECODE_ENGINE_ARGS": ""}
    launch = Launch(tmp_path / "run", *arguments, engine=MOCKER | of_the_script, DECODE_WORKERS="2")
    launches.append(launch)

    assert f"ready: http://127.0.0.1:{launch.port} (1 prefill, 2 decode)" in launch.read_until("ready:")
    assert f"curl -s http://127.0.0.1:{launch.port}/v1/chat/completions" in launch.read_until("try:")
    url = f"http://127.0.0.1:{launch.port}"
    answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 6})
    assert answer.json()["usage"]["completion_tokens"] == 6

    launch.popen.send_signal(stop)
    status, _ = launch.end()

    assert status == 0
    assert launch.processes() == {}
    names = ("frontend", "prefill-0", "decode-0", "decode-1")
    logs = "".join((launch.run_dir / f"{name}.log").read_text() for name in names)
    assert "forced" not in logs  # each process is asked once
    assert "nats_error" not in logs  # and has what it needs until it ends


def test_every_process_gets_flags_and_a_frontend_with_https_is_waited_for(
    launches: list[Launch], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    (cert, key), (own_cert, own_key) = authority.sign("server"), authority.sign("client")
    environ = {
        "FRONTEND_FLAGS": f"--tls-cert-file {cert} --tls-key-file {key} --tls-client-ca-file {authority.ca}",
        "STATUS_FLAGS": f"--tls-cert-file {own_cert} --tls-key-file {own_key}",
        "PREFILL_FLAGS": "--max-batch-size 7",
        "DECODE_FLAGS": "--max-batch-size 9\n--drain-timeout-s 1",
    }
    launch = Launch(tmp_path / "run", engine=MOCKER | environ)
    launches.append(launch)

    assert f"ready: https://127.0.0.1:{launch.port} (1 prefill, 1 decode)" in launch.read_until("ready:")
    for name, size in (("prefill-0", 7), ("decode-0", 9)):
        assert f" max_batch_size={size} (flag)" in (launch.run_dir / f"{name}.log").read_text()


def test_a_slow_nats_server_is_waited_for(launches: list[Launch], tmp_path: Path) -> None:
    (tmp_path / "nats-server").write_text(f'#!/bin/sh\nsleep 5\nexec {shutil.which("nats-server")} "$@"\n')
    (tmp_path / "nats-server").chmod(0o755)
    launch = Launch(tmp_path / "run", "--cluster", PATH=f"{tmp_path}:{os.environ['PATH']}")
    launches.append(launch)

    assert "(1 prefill, 1 decode)" in launch.read_until("ready:")


def knows(url: str, num_workers: int) -> bool:
    return len(httpx.get(f"{url}/health").json()["instances"]) == num_workers


def test_a_registry_with_other_workers_is_shared(
    launches: list[Launch], tmp_path: Path, own_etcd: str, nats_server: str
) -> None:
    for name, num in (("first", 1), ("second", 2)):
        launch = Launch(tmp_path / name, "--cluster", ETCD_ENDPOINTS=own_etcd, NATS_SERVER=nats_server)
        launches.append(launch)
        url = launch.read_until("ready:").split("ready: ")[1].split()[0]
        wait_for(partial(knows, url, 2 * num))


def kill_process(launch: Launch, words: str) -> None:
    os.kill(next(pid for pid, command in launch.processes().items() if words in command), signal.SIGKILL)


def test_a_worker_that_is_killed_starts_again_and_without_the_frontend_all_ends(
    launches: list[Launch], tmp_path: Path
) -> None:
    launch = Launch(tmp_path / "run")
    launches.append(launch)
    launch.read_until("try:")

    kill_process(launch, "--disaggregation-mode decode")
    output = launch.read_until("again")
    assert (
        output.strip()
        == f"decode-0 was killed by SIGKILL; it starts again (log: {tmp_path}/run/decode-0.log)"
    )
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
    url = f"http://127.0.0.1:{launch.port}/v1/completions"
    wait_for(lambda: httpx.post(url, json=body, timeout=PATIENCE_S).status_code == 200)

    kill_process(launch, "-m frontend")
    status, output = launch.end()
    assert status == 1
    assert "frontend was killed by SIGKILL; its last lines" in output
    assert launch.processes() == {}


def test_a_worker_that_ends_right_after_its_restart_ends_the_run(
    launches: list[Launch], tmp_path: Path
) -> None:
    launch = Launch(tmp_path / "run")
    launches.append(launch)
    launch.read_until("try:")

    kill_process(launch, "--disaggregation-mode prefill")
    launch.read_until("again")
    wait_for(lambda: any("--disaggregation-mode prefill" in each for each in launch.processes().values()))
    kill_process(launch, "--disaggregation-mode prefill")
    status, output = launch.end()
    assert status == 1
    assert "prefill-0 was killed by SIGKILL; its last lines" in output


def test_a_port_in_use_is_one_clear_line(launches: list[Launch], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(tmp_path / "run", HTTP_PORT=str(port))
        launches.append(launch)
        status, output = launch.end()

    assert status == 1
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another" in output
    assert launch.processes() == {}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MODEL_PATH": "/no/such/model"}, "error: --model-path /no/such/model: no config.json in"),
        (
            {"DECODE_ENGINE_ARGS": "{yaml}"},
            "{yaml}:1: decode_step: unknown key; did you mean decode_step_ms?",
        ),
        ({"ENGINE": "nope"}, "--engine: invalid choice: 'nope'"),
        ({"START_TIMEOUT_S": "0"}, "error: not ready after 0 s"),
    ],
)
def test_a_mistake_is_one_clear_line(
    launches: list[Launch], tmp_path: Path, environ: dict[str, str], says: str
) -> None:
    yaml = tmp_path / "wrong.yaml"
    yaml.write_text("decode_step: 1\n")
    environ = {name: value.format(yaml=yaml) for name, value in environ.items()}

    launch = Launch(tmp_path / "run", engine=MOCKER | environ)
    launches.append(launch)
    status, output = launch.end()

    assert status == 1
    assert says.format(yaml=yaml) in output
    assert launch.processes() == {}


def test_an_unknown_argument_is_refused(launches: list[Launch], tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "--wat")
    launches.append(launch)

    assert launch.end() == (2, "usage: launch/local.sh [--cluster]\n")
