"""A log that nobody reads holds nobody up; what is lost is counted. Each record is one line, text or JSON."""

import json
import logging
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from baton import telemetry
from baton.telemetry import Formatter, Line, Lines
from tests.waiting import PATIENCE_S


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to read of what stderr is written to."""
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
    while end not in found:
        ready, _, _ = select.select([reading], [], [], PATIENCE_S)
        assert ready, f"no more was written after {found[-200:]!r}"
        found += os.read(reading, 1 << 16).decode()
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
    read_until(pipe, f"lost_lines={lines.num_lost} ")  # an earlier report may have counted fewer


def formatted(formatter: logging.Formatter, message: object, error: Exception | None = None) -> str:
    exc_info = (type(error), error, None) if error else None
    return formatter.format(logging.LogRecord("here", logging.INFO, "", 0, message, (), exc_info))


DATE = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
FORGED = "a\n2026-01-01T00:00:00.000+00:00 ERROR b\r\x1b[31m\u2028"


def test_a_line_has_its_date_and_zone() -> None:
    assert re.fullmatch(f"{DATE} INFO here worker lost", formatted(Formatter("text"), "worker lost"))


@pytest.mark.parametrize("formatter", [Formatter("text"), Formatter("json")])
@pytest.mark.parametrize("message", [FORGED, Line(f"ended {FORGED}", request_id=FORGED)])
def test_no_text_looks_like_another_line(formatter: logging.Formatter, message: object) -> None:
    first, *others = formatted(formatter, message, ValueError(FORGED)).split("\n")
    assert first.isprintable()
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_json_line_has_the_fields_of_the_message() -> None:
    line = Line("retrying", request_id="r-1", attempt=2, worker="", detail=None)
    found = json.loads(formatted(Formatter("json"), line, ValueError("why")))
    assert re.fullmatch(DATE, found.pop("time"))
    assert "ValueError: why" in found.pop("exception")
    expected = {"level": "INFO", "logger": "here", "message": "retrying", "request_id": "r-1", "attempt": 2}
    assert found == expected


@pytest.mark.parametrize(("form", "begins"), [("text", "error: it broke\n"), ("json", '{"time": "20')])
def test_the_last_error_has_the_format_of_the_log(form: str, begins: str) -> None:
    code = f"from baton.telemetry import *; configure_logging('info', '{form}'); print_error('it broke')"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert printed.startswith(begins)
    assert printed.count("\n") == 1


def test_a_value_cannot_end_a_line_or_begin_a_field() -> None:
    line = Line("worker lost", worker="d1", detail='a\nb c="d"\x1b\u2028', num=3)
    assert str(line) == 'worker lost worker=d1 detail="a\\nb c=\\"d\\"\\u001b\\u2028" num=3'
