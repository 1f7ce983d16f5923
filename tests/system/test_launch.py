"""`launch/local.sh` for a new user: ready in one line, stopped without a trace, clear errors."""

import os
import re
import signal
import socket
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.launched import MOCKER, Run
from tests.stack import MODEL
from tests.waiting import PATIENCE_S, wait_for


@pytest.mark.parametrize(
    ("command", "stop"),
    [
        ("local.sh", signal.SIGINT),
        ("local.sh --cluster", signal.SIGTERM),
        pytest.param("local.sh", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("local.sh --cluster", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_it_says_ready_serves_and_leaves_nothing_behind(run: Run, command: str, stop: signal.Signals) -> None:
    of_the_script = {"PREFILL_ENGINE_ARGS": "", "DECODE_ENGINE_ARGS": ""}
    launch = run(command, MOCKER | of_the_script, DECODE_WORKERS="2")

    assert f"ready: http://127.0.0.1:{launch.port} (1 prefill, 2 decode)" in launch.read_until("ready:")
    rest = launch.read_until("try:")
    assert f"page:  {launch.url}/ " in rest
    assert f"curl -s {launch.url}/v1/chat/completions" in rest
    answer = httpx.post(
        f"{launch.url}/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 6}
    )
    assert answer.json()["usage"]["completion_tokens"] == 6

    launch.popen.send_signal(stop)
    status, _ = launch.end()

    assert status == 0
    wait_for(lambda: launch.processes() == {})
    names = ("frontend", "prefill-0", "decode-0", "decode-1")
    logs = "".join((launch.run_dir / f"{name}.log").read_text() for name in names)
    assert "forced" not in logs  # each process gets one signal
    assert "nats_error" not in logs  # and has what it needs until it ends


def test_every_process_gets_flags_and_a_frontend_with_https_is_waited_for(run: Run, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    (cert, key), (own_cert, own_key) = authority.sign("server"), authority.sign("client")
    environ = {
        "FRONTEND_FLAGS": f"--tls-cert-file {cert} --tls-key-file {key} --tls-client-ca-file {authority.ca}",
        "STATUS_FLAGS": f"--tls-cert-file {own_cert} --tls-key-file {own_key}",
        "PREFILL_FLAGS": "--max-batch-size 7",
        "DECODE_FLAGS": "--max-batch-size 9\n--drain-timeout-s 1",
    }
    launch = run("local.sh", MOCKER | environ)

    assert f"ready: https://127.0.0.1:{launch.port} (1 prefill, 1 decode)" in launch.read_until("ready:")
    for name, size in (("prefill-0", 7), ("decode-0", 9)):
        assert f" max_batch_size={size} (flag)" in (launch.run_dir / f"{name}.log").read_text()


def has_workers(url: str, num_workers: int) -> bool:
    return len(httpx.get(f"{url}/health").json()["instances"]) == num_workers


def test_a_registry_with_other_workers_is_shared(run: Run, own_etcd: str, nats_server: str) -> None:
    services = {"ETCD_ENDPOINTS": own_etcd, "NATS_SERVER": nats_server}
    for name, num in (("first", 1), ("second", 2)):
        launch = run("local.sh --cluster", FOLDER=name, **services)
        assert "ready: " in launch.read_until("ready:")
        wait_for(partial(has_workers, launch.url, 2 * num))


def test_a_worker_that_is_killed_starts_again_and_without_the_frontend_all_ends(run: Run) -> None:
    launch = run("local.sh")
    launch.read_until("try:")

    os.kill(launch.pid_of("--disaggregation-mode decode"), signal.SIGKILL)
    log = launch.run_dir / "decode-0.log"
    output = launch.read_until("restarting")
    assert f"decode-0 was killed by SIGKILL; restarting it (log: {log})\n" in output
    assert "setsid" not in output  # bash's own line about a killed job
    event = "worker lost worker=decode-0"
    output += "" if event in output else launch.read_until(event)
    assert re.search(rf"^[\d:]{{8}} {event} ", output, re.MULTILINE)
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
    url = f"{launch.url}/v1/completions"
    wait_for(lambda: httpx.post(url, json=body, timeout=PATIENCE_S).status_code == 200)

    os.kill(launch.pid_of("-m frontend"), signal.SIGKILL)
    status, output = launch.end()
    assert status == 1
    assert "frontend was killed by SIGKILL; its last lines" in output
    wait_for(lambda: launch.processes() == {})


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_worker_that_does_not_become_ready_again_ends_the_run(
    run: Run, log_format: str, tmp_path: Path
) -> None:
    hang, yaml = tmp_path / "hang", tmp_path / "mocker.yaml"
    yaml.write_text(f"hang_while: {hang}\n")
    launch = run("local.sh", MOCKER | {"PREFILL_ENGINE_ARGS": str(yaml)}, BATON_LOG_FORMAT=log_format)
    launch.read_until("try:")
    hang.touch()  # from now on it waits 20 s for its pair before it is ready

    mode = "--disaggregation-mode prefill"
    for number in range(4):  # the first end is of a worker that was ready
        wait_for(lambda: any(mode in each for each in launch.processes().values()))
        os.kill(launch.pid_of(mode), signal.SIGKILL)
        output = launch.read_until("restarting" if number < 3 else "error: ")
        assert "restarting it" in output or number == 3
    status, more = launch.end()
    assert status == 1
    assert "error: prefill-0 ended 3 times in a row before it was ready\n" in output
    assert "prefill-0 was killed by SIGKILL; its last lines" in more


def test_a_port_in_use_is_one_clear_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = run("local.sh", HTTP_PORT=str(port))
        assert launch.end() == (1, f"error: port {port} is in use; set HTTP_PORT to another one\n")


WRONG_YAML = (
    {"DECODE_ENGINE_ARGS": "{yaml}"},
    "{yaml}: decode_step: unknown key; did you mean decode_step_ms?",
)


@pytest.mark.parametrize(
    ("command", "environ", "says"),
    [
        ("local.sh", {"MODEL_PATH": "/no/such/model"}, "--model-path /no/such/model: no config.json in"),
        ("local.sh", *WRONG_YAML),
        ("gpt_oss_disagg.sh", *WRONG_YAML),
        ("local.sh", {"ENGINE": "nope"}, "--engine: invalid choice: 'nope'"),
        ("local.sh", {"START_TIMEOUT_S": "0"}, "error: not ready after 0 s"),
        ("local.sh", {"PYTHON": "/bin/false"}, "error: /bin/false cannot run Baton: run `make install`"),
        ("local.sh", {"DECODE_WORKERS": "two"}, "error: DECODE_WORKERS=two: must be a whole number"),
    ],
)
def test_a_mistake_is_one_clear_line(
    run: Run, tmp_path: Path, command: str, environ: dict[str, str], says: str
) -> None:
    yaml = tmp_path / "wrong.yaml"
    yaml.write_text("decode_step: 1\n")
    environ = {name: value.format(yaml=yaml) for name, value in environ.items()}

    launch = run(command, MOCKER | environ)
    status, output = launch.end()

    assert status in (1, 2)
    assert says.format(yaml=yaml) in output
    wait_for(lambda: launch.processes() == {})


def test_an_unknown_argument_is_refused(run: Run) -> None:
    assert run("local.sh --wat").end() == (2, "usage: launch/local.sh [--cluster]\n")
