"""A supervisor of tiny processes: `python -m tests.supervised NUM_PROCESSES PORT [FAILURE]`.

A process answers a line from each connection with its index and its process id, and then:

* `hold`: accepts nothing more until that client hangs up.
* `linger`: does so too, and ends then; SIGTERM does not end it earlier.
* `exit N`: ends with that status.
* `handle`: handles a signal by itself.

FAILURE is how the second process fails to start, while the first is never ready: `status`, `exception` or
`kill`. With `late` the first is ready; the second is so at the first SIGTERM, and ends at the second. With
`aged` all start, and are hours old once the first serves. With `replacements` two processes start; the next
two fail to.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

from frontend.processes import handover, supervisor
from frontend.processes.handover import ProcessEnd

SPOILT = 1
STARTS = b"++--"


def small_channel() -> tuple[socket.socket, socket.socket]:
    """One that is full after a few connections."""
    ours, theirs = handover.channel()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ours, theirs


def _fail(how: str) -> int:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise ValueError("spoilt")
    return 5


def _starts() -> Callable[[], bool]:
    """Whether the process that asks starts; all processes share the plan."""
    plan, planned = os.pipe()
    os.write(planned, STARTS)
    os.close(planned)
    return lambda: os.read(plan, 1) != b"-"


def _be_late(end: ProcessEnd) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    logging.info("late pid=%d ", os.getpid())
    signal.sigwait({signal.SIGTERM})
    end.ready()
    signal.sigwait({signal.SIGTERM})
    return 0


def _obey(connection: socket.socket, index: int) -> None:
    word, _, number = connection.recv(64).decode().partition(" ")
    if word == "linger":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with connection, suppress(OSError):  # the client hangs up as it likes
        connection.sendall(b"%d %d" % (index, os.getpid()))
        if word in ("hold", "linger"):
            connection.recv(1)
    if word == "linger":
        os._exit(0)
    if word == "exit":
        os._exit(int(number))
    if word == "handle":
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        os.kill(os.getpid(), signal.SIGTERM)


def main(num_processes: int, port: int, failure: str = "") -> int:
    """The supervisor's status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listener = socket.create_server(("127.0.0.1", port))

    def serve(index: int, channel: socket.socket) -> int:
        end = ProcessEnd(channel, ("127.0.0.1", port), lambda: os._exit(0))
        if failure == "late" and index == SPOILT:
            return _be_late(end)
        if failure in {"status", "exception", "kill"}:
            if index != SPOILT:
                signal.pause()
            return _fail(failure)
        if failure == "replacements" and not starts():
            return _fail("status")
        end.ready()
        while True:
            connection, _ = end.accept()
            _obey(connection, index)

    def listening() -> None:
        logging.info("serving")
        if failure == "aged":
            supervisor.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)  # type: ignore[attr-defined,assignment]  # later
            supervisor._RESTART_S = 3600  # noqa: SLF001  so that it cannot end here

    starts = _starts()
    if failure == "replacements":
        supervisor._RESTART_S = 0.1  # noqa: SLF001  several are waited for
    supervisor.channel = small_channel  # type: ignore[attr-defined]  # full soon
    status = supervisor.Supervisor(listener, num_processes, serve, listening).run()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
