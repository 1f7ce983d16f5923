"""The gpt-oss launch scripts, really run: ready, logs shown, everything stopped when one ends or on
Ctrl-C."""

import os
import re
import signal
import time

import httpx
import pytest

from tests.launched import DOUBLE, Run
from tests.stack import MODEL
from tests.waiting import signal_process, wait_for


@pytest.mark.parametrize(
    ("command", "fleet", "names"),
    [
        ("gpt_oss_disagg.sh", "1 prefill, 1 decode", ("frontend", "prefill-0", "decode-0")),
        ("gpt_oss_agg.sh spark", "0 prefill, 1 decode", ("frontend", "agg-0")),
        pytest.param(
            *("gpt_oss_20b.sh --disagg", "1 prefill, 1 decode", ("frontend", "prefill-0", "decode-0")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_serves_shows_its_logs_and_ends_with_ctrl_c(
    run: Run, services: dict[str, str], command: str, fleet: str, names: tuple[str, ...]
) -> None:
    launch = run(command, **services)

    output = launch.read_until("ready: ")
    assert f"ready: {launch.url} ({fleet})" in output
    progress = re.sub(r"(\d) ", r"\\d of \1 ", fleet) + " ready"
    for line in re.findall(r"^waiting: .*", output, re.MULTILINE):  # none if it is ready at the first look
        assert re.search(progress, line)
    answer = httpx.post(
        f"{launch.url}/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 6}
    )
    assert answer.json()["usage"]["completion_tokens"] == 6

    launch.popen.send_signal(signal.SIGINT)
    status, rest = launch.end()

    assert status == 130
    for name in names:
        assert re.search(rf"^{name} \| .+", output + rest, re.MULTILINE)
        assert (launch.run_dir / f"{name}.log").stat().st_size > 0
    wait_for(lambda: launch.processes() == {})


def test_a_second_signal_kills_at_once(run: Run) -> None:
    launch = run("gpt_oss_disagg.sh", STOP_TIMEOUT_S="600")
    launch.read_until("ready: ")
    signal_process(launch.pid_of("--disaggregation-mode decode"), signal.SIGSTOP)

    launch.popen.send_signal(signal.SIGINT)
    launch.read_until("stopping")
    while launch.popen.poll() is None:
        launch.popen.send_signal(signal.SIGINT)
        time.sleep(0.2)  # as if a user pressed Ctrl-C again

    assert launch.end()[0] == 130
    wait_for(lambda: launch.processes() == {})


@pytest.mark.parametrize("mode", ["prefill", pytest.param("decode", marks=pytest.mark.slow)])
def test_a_worker_that_dies_ends_the_run_with_its_last_lines(run: Run, mode: str) -> None:
    launch = run("gpt_oss_disagg.sh")
    launch.read_until("ready: ")

    os.kill(launch.pid_of(f"--disaggregation-mode {mode}"), signal.SIGKILL)
    status, output = launch.end()

    assert status == 1
    assert f"{mode}-0 was killed by SIGKILL; its last lines" in output
    wait_for(lambda: launch.processes() == {})


def test_what_the_doctor_calls_an_error_is_not_started(run: Run) -> None:
    launch = run("gpt_oss_disagg.sh", DOUBLE, SKIP_DOCTOR="", ETCD_ENDPOINTS="http://127.0.0.1:9")
    status, output = launch.end()
    assert (status, "error    etcd at http://127.0.0.1:9: " in output) == (1, True)
    assert output.endswith("error: not started: fix the errors above (or set SKIP_DOCTOR=1)\n")
    assert not (launch.run_dir / "frontend.log").exists()
