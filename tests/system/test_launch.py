"""`launch/local.sh` as a newcomer meets it: ready in a line, gone without trace, a clear line for a slip."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.stack import MODEL, ROOT


class Launch:
    """One run of the script, with the mocker unless told otherwise."""

    def __init__(self, run_dir: Path, *arguments: str, **environ: str) -> None:
        self.port = int(environ.get("HTTP_PORT", free_port()))
        self.run_dir = run_dir
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "ETCD_", "NATS_"))}
        mocker = "engine_configs/demo/mocker.yaml"
        settings = {"ENGINE": "mocker", "PREFILL_ENGINE_ARGS": mocker, "DECODE_ENGINE_ARGS": mocker}
        settings |= {"HTTP_PORT": str(self.port), "RUN_DIR": str(run_dir), "PYTHON": sys.executable}
        self.popen = subprocess.Popen(
            [str(ROOT / "launch/local.sh"), *arguments],
            env=inherited | settings | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, wanted: str) -> str:
        """The output up to a line that contains `wanted`, or all of it."""
        assert self.popen.stdout is not None
        text = ""
        for line in self.popen.stdout:
            text += line
            if wanted in line:
                break
        return text

    def end(self) -> tuple[int, str]:
        """(exit status, output) once it has ended by itself."""
        output, _ = self.popen.communicate(timeout=60)
        return self.popen.returncode, output

    def processes(self) -> dict[int, str]:
        """Command lines of this run's processes by pid, told by the RUN_DIR that they inherit."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"RUN_DIR={self.run_dir}\0".encode() in environ.read_bytes():
                    command = (environ.parent / "cmdline").read_text().replace("\0", " ")
                    found[int(environ.parent.name)] = command
            except (PermissionError, ProcessLookupError, FileNotFoundError):
                continue
        return found


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.popen.terminate()
        launch.popen.communicate(timeout=60)


@pytest.mark.parametrize("arguments", [(), ("--cluster",)])
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_ready_serves_and_leaves_nothing_behind(
    launches: list[Launch], tmp_path: Path, arguments: tuple[str, ...], stop: signal.Signals
) -> None:
    if arguments and not (shutil.which("etcd") and shutil.which("nats-server")):
        pytest.fail("etcd and nats-server must be on the PATH: make servers")
    launch = Launch(tmp_path / "run", *arguments, DECODE_WORKERS="2")
    launches.append(launch)

    assert f"ready: http://127.0.0.1:{launch.port} (1 prefill, 2 decode)" in launch.read_until("ready:")
    url = f"http://127.0.0.1:{launch.port}"
    answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 6})
    assert answer.json()["usage"]["completion_tokens"] == 6

    launch.popen.send_signal(stop)
    status, _ = launch.end()

    assert status == 0
    assert launch.processes() == {}


def test_a_process_that_dies_later_ends_the_run_with_its_last_lines(
    launches: list[Launch], tmp_path: Path
) -> None:
    launch = Launch(tmp_path / "run")
    launches.append(launch)
    launch.read_until("ready:")

    victim = next(
        pid for pid, command in launch.processes().items() if "--disaggregation-mode decode" in command
    )
    os.kill(victim, signal.SIGKILL)
    status, output = launch.end()

    assert status == 1
    assert "decode-0 ended with status 137; its last lines" in output
    assert launch.processes() == {}


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
        ({"MODEL_PATH": "/no/such/model"}, "error: --model-path /no/such/model: no config.json there"),
        (
            {"DECODE_ENGINE_ARGS": "{yaml}"},
            "{yaml}:1: decode_step: unknown key; did you mean decode_step_ms?",
        ),
        ({"ENGINE": "nope"}, "argument --engine: invalid choice: 'nope'"),
        ({"START_TIMEOUT_S": "0"}, "error: not ready after 0 s"),
    ],
)
def test_a_mistake_is_one_clear_line(
    launches: list[Launch], tmp_path: Path, environ: dict[str, str], says: str
) -> None:
    yaml = tmp_path / "wrong.yaml"
    yaml.write_text("decode_step: 1\n")
    began = time.monotonic()
    environ = {name: value.format(yaml=yaml) for name, value in environ.items()}

    launch = Launch(tmp_path / "run", **environ)
    launches.append(launch)
    status, output = launch.end()

    assert status == 1
    assert says.format(yaml=yaml) in output
    assert launch.processes() == {}
    assert time.monotonic() - began < 30


def test_an_unknown_argument_is_refused(launches: list[Launch], tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", "--wat")
    launches.append(launch)

    assert launch.end() == (2, "usage: launch/local.sh [--cluster]\n")
