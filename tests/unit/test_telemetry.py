"""A log that nobody reads holds nobody up; what is lost is counted and said."""

import logging
import os
import re
import threading
from collections.abc import Iterator

import pytest

from baton import telemetry
from baton.telemetry import Lines
from tests.waiting import PATIENCE_S


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """What stderr is written to; its buffer has one page."""
    reading, writing = os.pipe()
    monkeypatch.setattr(telemetry, "_STDERR", writing)
    monkeypatch.setattr(telemetry, "MAX_WAITING", 20)
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.01)
    yield reading
    os.close(reading)  # which ends the thread's write
    os.close(writing)


def log(lines: Lines, text: str) -> None:
    lines.emit(logging.makeLogRecord({"msg": text}))


def read_until(reading: int, end: str) -> str:
    found = ""
    deadline = threading.Timer(PATIENCE_S, os.close, [reading])
    deadline.start()
    while end not in found:
        found += os.read(reading, 1 << 16).decode()
    deadline.cancel()
    return found


def test_records_are_written_in_their_order(pipe: int) -> None:
    lines = Lines()
    for i in range(10):
        log(lines, f"line {i}")
    assert read_until(pipe, "line 9\n") == "".join(f"line {i}\n" for i in range(10))
    assert lines.num_lost == 0


def test_lines_are_lost_and_counted_while_nobody_reads(pipe: int) -> None:
    lines = Lines()
    for i in range(100):
        log(lines, f"{i} " + "x" * 8000)
    lines.flush()
    assert lines.num_lost >= 100 - 20 - 10  # those that wait, and those that the pipe holds
    found = read_until(pipe, "lost_lines=")
    log(lines, "end")
    found += read_until(pipe, "end\n")
    assert re.findall(r"lost_lines=(\d+)", found) == [str(lines.num_lost)]


def test_a_forked_process_has_its_own_thread_and_lines(pipe: int) -> None:
    lines = Lines()
    log(lines, "parent")
    pid = os.fork()
    if pid == 0:
        log(lines, "child")
        lines.flush()
        os._exit(0)
    os.waitpid(pid, 0)
    assert "parent\n" in read_until(pipe, "child\n")
