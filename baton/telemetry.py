"""Logging: one `key=value` line per state change, to stderr, by a thread that may wait for its reader."""

import logging
import math
import os
import queue
import sys
import threading
import time
from typing import Literal, NoReturn

log = logging.getLogger(__name__)

LogLevel = Literal["debug", "info", "warning", "error"]

MAX_WAITING = 10_000
"""Lines; more are lost, and counted."""
FLUSH_S = 1.0
"""How long the end of a process waits for the reader."""
_STDERR = 2
_LOG_EVERY_S = 60.0


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
                lost.msg = f"lost_lines={self._num_reported} reason=stderr was not read"
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


def configure_logging(level: LogLevel) -> None:
    """Send every record of this process to stderr as `time level logger message`."""
    global lines  # noqa: PLW0603  one per process, like the logging module's own state
    lines = Lines()
    lines.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[lines], force=True)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def print_error(error: object) -> None:
    """Print why the process ends, as the last line after its log."""
    if lines is not None:
        lines.flush()
    sys.stderr.write(f"error: {error}\n")


def leave(status: int) -> NoReturn:
    """End the process at once, but for its log."""
    logging.shutdown()
    os._exit(status)


class Unauthenticated:
    """Counts messages that no process of this fleet sent; logs them once a minute."""

    def __init__(self) -> None:
        self.num_messages = 0
        self._logged_s = -math.inf

    def note(self, place: str) -> None:
        """Count a message that came to `place`."""
        self.num_messages += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("unauthenticated_messages=%d last=%s", self.num_messages, place)


unauthenticated = Unauthenticated()
"""This process's."""
