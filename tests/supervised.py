"""A supervisor of tiny processes: `python -m tests.supervised NUM_PROCESSES PORT [FAILURE]`.

A process answers a line from each connection with its index and its process id, and then:

* `linger`: waits until that client hangs up and ends then; SIGTERM does not end it earlier.
* `exit N`: ends with that status.

FAILURE is how the second process fails to start, while the first is never ready: `status`, `exception` or
`kill`. With `replacements` two processes start; the next two fail to."""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress

import uvloop

from frontend.processes import supervisor
from frontend.processes.supervisor import Place, Port

SPOILT = 1
STARTS = b"++--"
PLAN = "SUPERVISED_PLAN"
"""The variable with the descriptor that says who starts."""


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


async def _obey(connection: socket.socket, index: int) -> None:
    loop = asyncio.get_running_loop()
    word, _, number = (await loop.sock_recv(connection, 64)).decode().partition(" ")
    if word == "linger":
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
    with connection, suppress(OSError):  # the client hangs up as it likes
        await loop.sock_sendall(connection, b"%d %d" % (index, os.getpid()))
        if word == "linger":
            await loop.sock_recv(connection, 1)
    if word == "linger":
        os._exit(0)
    if word == "exit":
        os._exit(int(number))


async def _serve(place: Place) -> None:
    place.watch(lambda: os._exit(0))
    place.report_ready()
    with socket.socket(fileno=place.listener) as listener:
        listener.setblocking(False)
        tasks = set()
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            tasks.add(asyncio.create_task(_obey(connection, place.index)))
            if len(tasks) > 1:
                await asyncio.sleep(0.01)  # so that the other process is first


def serve(place: Place, failure: str) -> int:
    """Be one of the processes; its status."""
    if failure in {"status", "exception", "kill"}:
        if place.index != SPOILT:
            signal.pause()
        return _fail(failure)
    if failure == "replacements" and not _starts():
        return _fail("status")
    asyncio.run(_serve(place))
    return 0


class _Port(Port):
    async def passed_on(self) -> None:
        logging.info("serving")
        await super().passed_on()


def main(num_processes: int, port: int, failure: str = "") -> int:
    """The supervisor's status, or a process's."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    place = Place.from_environ()
    if place is not None:
        return serve(place, failure)
    listener = socket.create_server(("127.0.0.1", port))
    supervisor.RESTART_S = 0.1
    command = [sys.executable, "-m", "tests.supervised", *sys.argv[1:]]
    with tempfile.NamedTemporaryFile() as plan:
        plan.write(STARTS)
        plan.flush()
        os.environ[PLAN] = plan.name
        made = supervisor.Supervisor(_Port(listener), command, num_processes, "")
        return uvloop.run(made.run())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
