"""Logging: one line per state change, text or JSON, to stderr, by a thread that may wait for its reader."""

import json
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from datetime import datetime
from typing import Literal, NoReturn

log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

MAX_WAITING = 10_000
"""Lines; more are lost, and counted."""
FLUSH_S = 1.0
"""How long the end of a process waits for the reader."""
_STDERR = 2
_LOG_EVERY_S = 60.0

_PLAIN = re.compile(r"[^\s\"=\\]+")


class Line:
    """A log message with fields: `text key=value key="two words"`, or an object's members in a log of JSON.
    Fields that are None or empty are left out. No value can end the line."""

    def __init__(self, text: str, **fields: object) -> None:
        self.text = text
        self.fields = {name: each for name, each in fields.items() if each not in (None, "")}

    def __str__(self) -> str:
        return " ".join([self.text, *(f"{name}={_quoted(str(each))}" for name, each in self.fields.items())])


def _quoted(text: str) -> str:
    if text.isprintable() and _PLAIN.fullmatch(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class Formatter(logging.Formatter):
    """`date level logger message`; the lines of a traceback are indented, so that none of them looks like
    another record. Or one object a line: `time`, `level`, `logger`, `message`, the fields of a `Line`, and
    `exception`."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self.is_json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.fromtimestamp(record.created).astimezone()
        head = [written.isoformat(timespec="milliseconds"), record.levelname, record.name]
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if not self.is_json:
            first = " ".join([*head, _printable(record.getMessage())])
            return "\n  ".join([first, *map(_printable, trace.splitlines())])
        line = record.msg if isinstance(record.msg, Line) else Line(record.getMessage())
        found = dict(zip(("time", "level", "logger"), head, strict=True), message=line.text)
        return json.dumps(found | line.fields | ({"exception": trace} if trace else {}), default=str)


class Lines(logging.Handler):
    """Lets a thread write each record, so that a pipe that nobody reads stops nothing but the log."""

    def __init__(self) -> None:
        super().__init__()
        self.num_lost = 0
        self._num_reported = 0
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self.num_lost += 1
        except Exception:  # noqa: BLE001  as every handler: a record with wrong arguments ends nothing
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, for FLUSH_S at most."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, FLUSH_S)

    def _start(self) -> None:
        """A forked process has no threads, and the lines that wait are its parent's."""
        self._waiting: queue.Queue[str] = queue.Queue(MAX_WAITING)
        threading.Thread(target=self._write, args=(self._waiting,), name="log", daemon=True).start()

    def _write(self, waiting: "queue.Queue[str]") -> None:
        while True:
            text = waiting.get()
            if self.num_lost > self._num_reported:
                self._num_reported = self.num_lost
                lost = logging.makeLogRecord({"levelname": "WARNING", "name": __name__})
                lost.msg = Line("log lines lost", lost_lines=self._num_reported, reason="stderr was not read")
                text += "\n" + self.format(lost)
            _write(f"{text}\n".encode(errors="backslashreplace"))
            waiting.task_done()


def _write(data: bytes) -> None:
    """To the descriptor: Python's own stream has a lock, for which the end of the process would wait."""
    try:
        while data:
            data = data[os.write(_STDERR, data) :]
    except OSError:
        pass  # there is no reader


lines: Lines | None = None
"""This process's, once `configure_logging` was called."""


def num_lost_lines() -> int:
    """Lines of this process's log that were lost as nobody read them."""
    return 0 if lines is None else lines.num_lost


def configure_logging(level: LogLevel, form: LogFormat = "text") -> None:
    """Send every record of this process to stderr."""
    global lines  # noqa: PLW0603  one per process, like the logging module's own state
    lines = Lines()
    lines.setFormatter(Formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def print_error(error: object) -> None:
    """Print why the process ends, as the last line after its log, in words only."""
    error = re.sub(r"\[Errno -?\d+\] ", "", str(error))
    is_json = lines is not None and isinstance(lines.formatter, Formatter) and lines.formatter.is_json
    if is_json:
        log.error("%s", error)
    if lines is not None:
        lines.flush()
    if not is_json:
        sys.stderr.write(f"error: {error}\n")


def leave(status: int) -> NoReturn:
    """End the process at once, but for its log."""
    logging.shutdown()
    os._exit(status)


class Unauthenticated:
    """Counts messages that no process of this fleet sent; logs them once a minute."""

    num_messages = 0
    _logged_s = -math.inf

    def note(self, place: str) -> None:
        """Count a message that came to `place`."""
        self.num_messages += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("unauthenticated_messages=%d last=%s", self.num_messages, place)


unauthenticated = Unauthenticated()
"""This process's."""
