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
import tempfile
import time
from contextlib import suppress
from types import SimpleNamespace

import uvloop

from frontend.processes import supervisor
from frontend.processes.supervisor import Place, ProcessEnd, channel
from frontend.processes.takeover import Port

SPOILT = 1
STARTS = b"++--"
PLAN = "SUPERVISED_PLAN"
"""The variable with the descriptor that says who starts."""


def small_channel() -> tuple[socket.socket, socket.socket]:
    """One that is full after a few connections."""
    ours, theirs = channel()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ours, theirs


def _fail(how: str) -> int:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise ValueError("spoilt")
    return 5


def _starts() -> bool:
    """Whether this process starts; all processes of `replacements` share the plan."""
    with open(os.environ[PLAN], "r+b") as plan:
        left = plan.read()
        plan.seek(0)
        plan.truncate()
        plan.write(left[1:])
    return left[:1] != b"-"


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


def serve(place: Place, failure: str) -> int:
    """Be one of the processes; its status."""
    end = ProcessEnd(socket.socket(fileno=place.channel), place.address, lambda: os._exit(0))
    if failure == "late" and place.index == SPOILT:
        return _be_late(end)
    if failure in {"status", "exception", "kill"}:
        if place.index != SPOILT:
            signal.pause()
        return _fail(failure)
    if failure == "replacements" and not _starts():
        return _fail("status")
    end.ready()
    while True:
        connection, _ = end.accept()
        connection.setblocking(True)
        _obey(connection, place.index)


class _Port(Port):
    async def passed_on(self) -> None:
        logging.info("serving")
        if sys.argv[3:] == ["aged"]:
            supervisor.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)  # type: ignore[attr-defined,assignment]  # later
            supervisor.RESTART_S = 3600  # so that it cannot end here
        await super().passed_on()


def main(num_processes: int, port: int, failure: str = "") -> int:
    """The supervisor's status, or a process's."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    place = Place.told()
    if place is not None:
        return serve(place, failure)
    listener = socket.create_server(("127.0.0.1", port))
    if failure == "replacements":
        supervisor.RESTART_S = 0.1  # several are waited for
    supervisor.channel = small_channel  # full soon
    command = [sys.executable, "-m", "tests.supervised", *sys.argv[1:]]
    with tempfile.NamedTemporaryFile() as plan:
        plan.write(STARTS)
        plan.flush()
        os.environ[PLAN] = plan.name
        made = supervisor.Supervisor(_Port(listener), command, num_processes, "")
        return uvloop.run(made.run())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
