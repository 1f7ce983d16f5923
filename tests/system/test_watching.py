"""`python -m baton status`, `top` and `bench` on a running stack, in a pipe and on a terminal of 80 x 24."""

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from frontend.http.keys import line_of
from tests.stack import MODEL, Stack, running_stack
from tests.waiting import PATIENCE_S

ROWS, COLUMNS = 24, 80
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two mockers and a frontend, shared by this module."""
    with running_stack(tmp_path_factory.mktemp("stack"), "mocker") as stack:
        yield stack


def command(tool: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "baton", tool, *flags]


def piped(stack: Stack, tool: str, *flags: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Ended, with the stack's port in HTTP_PORT. No escape code is in what it printed."""
    variables = {**os.environ, "HTTP_PORT": str(stack.port), **environ}
    run = subprocess.run(
        command(tool, *flags), env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "\x1b" not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
    return run


class Terminal:
    """A tool on a terminal of its own, in a `with` block that it does not outlive."""

    def __init__(self, stack: Stack, tool: str, *flags: str, columns: int = COLUMNS) -> None:
        self._own, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        variables |= {"HTTP_PORT": str(stack.port), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command(tool, *flags), env=variables, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)

    def read(self) -> bool:
        """What comes within a moment; whether more may come."""
        if not select.select([self._own], [], [], 0.1)[0]:
            return True
        try:
            found = os.read(self._own, 1 << 16)
        except OSError:  # the tool has ended
            return False
        self.text += found.decode()
        return bool(found)

    def wait_for(self, words: str) -> str:
        """A whole screen with these words."""
        begin, give_up = len(self.text), time.monotonic() + PATIENCE_S
        while not (seen := [s for s in self._screens(begin) if words in s]):
            assert self.read(), self.text
            assert time.monotonic() < give_up, self.text
        return seen[0]

    def _screens(self, begin: int) -> list[str]:
        return [_STYLE.sub("", screen) for screen in self.text[begin:].split("\x1b[H")[1:-1]]

    def ended(self) -> int:
        """Its exit status, once it has printed all."""
        give_up = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < give_up, self.text
        return self.process.wait(PATIENCE_S)


def test_bench_measures_what_was_sent_and_status_shows_it(stack: Stack) -> None:
    load = ("--requests", "6", "--concurrency", "2", "--isl", "200", "--osl", "8")

    run = piped(stack, "bench", *load, "--json")

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["model"], found["answered"], found["failed"], found["num_tokens"]) == (MODEL, 6, 0, 8)
    assert 190 < found["num_prompt_tokens"] < 210
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["duration_ms"]["max"]
    assert found["itl_ms"]["mean"] > 0

    seen = piped(stack, "status")
    assert (seen.returncode, seen.stderr) == (0, "")
    lines = seen.stdout.splitlines()
    assert lines[0] == "healthy: 1 prefill, 1 decode"
    for process, role in zip(stack.processes[1:], ("prefill", "decode"), strict=True):
        (row,) = [line for line in lines if f":{process.popen.pid} " in line]
        assert re.search(rf" {role} +ready ", row)
    assert len(lines[lines.index("SLOWEST of the last five minutes") + 1 :]) >= 5
    assert len([line for line in lines if re.search(r" joined", line)]) == 2
    assert piped(stack, "top", "--count", "2", "--interval", "0.1").stdout.count(lines[0]) == 2


def test_top_fits_80_columns_and_survives_a_frontend_that_is_away(stack: Stack) -> None:
    with Terminal(stack, "top", "--interval", "0.1") as terminal:
        screen = terminal.wait_for("healthy: 1 prefill, 1 decode").split("\r\n")
        assert len(screen) <= ROWS
        assert max(map(len, screen)) <= COLUMNS
        (row,) = [line for line in screen if f":{stack.processes[1].popen.pid}" in line]
        assert " prefill " in row
        stack.processes[0].signal(signal.SIGSTOP)
        try:
            terminal.wait_for("it does not answer in time")
        finally:
            stack.processes[0].signal(signal.SIGCONT)
        assert "Ctrl-C: quit" in terminal.wait_for("healthy: 1 prefill, 1 decode")
    with Terminal(stack, "status", columns=40) as terminal:
        assert terminal.ended() == 0
        assert re.search(r"prefill-\d +prefill +ready ", _STYLE.sub("", terminal.text))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_signals_end_top_and_restore_the_terminal(stack: Stack, number: signal.Signals, status: int) -> None:
    with Terminal(stack, "top") as terminal:
        while "healthy" not in terminal.text:
            assert terminal.read()
        terminal.process.send_signal(number)
        assert terminal.ended() == status
        assert "Traceback" not in terminal.text
        assert terminal.text.endswith("\x1b[?1049l"), "the screen is the shell's again"


def test_bench_on_a_terminal_draws_progress_and_a_plot(stack: Stack) -> None:
    with Terminal(stack, "bench", "--requests", "4", "--osl", "4", "--isl", "1") as terminal:
        assert terminal.ended() == 0
        shown = _STYLE.sub("", terminal.text)
        assert "100%" in shown
        assert "4 answers in " in shown
        assert "first token (blue) and longest gap (green)" in shown
        assert max(len(line) for line in shown.split("\r\n") if "\u2502" in line) <= COLUMNS


def test_a_bench_that_is_stopped_prints_the_figures_so_far(stack: Stack) -> None:
    with Terminal(stack, "bench", "--requests", "1000", "--osl", "40") as terminal:
        while not re.search(r"[1-9]%", terminal.text):
            assert terminal.read()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 130
        assert re.search(r"the figures so far:\s+\d+ answers in ", _STYLE.sub("", terminal.text))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--url", "9"], "no frontend answers at http://127.0.0.1:9: Connection refused; HTTP_PORT or --url"),
        (["--model", "nope"], "The model 'nope' does not exist"),
        (["--timeout-s", "0.001"], "no frontend answers at http://127.0.0.1:"),
        (["--isl", "140000"], "This model's maximum context length is 131072 tokens"),
    ],
)
def test_a_bench_that_cannot_begin_is_one_sentence(stack: Stack, flags: list[str], sentence: str) -> None:
    run = piped(stack, "bench", *flags)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: {sentence}")
    assert run.stderr.count("\n") == 1


def test_with_api_keys_bench_needs_one_and_status_shows_figures_only(stack: Stack, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(line_of("ann", "sk-ann") + "\n")
    keys.chmod(0o600)
    process, url = stack.another_frontend("--api-keys-file", str(keys))
    try:
        refused = piped(stack, "bench", "--url", url)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert "Export it as BATON_API_KEY" in refused.stderr
        flags = ("--url", url, "--requests", "2", "--osl", "2")
        assert piped(stack, "bench", *flags, BATON_API_KEY="sk-ann").returncode == 0
        shown = piped(stack, "status", "--url", url)
        assert shown.returncode == 0
        assert re.search(r"\d s  200  -  ", shown.stdout)
    finally:
        process.kill()
