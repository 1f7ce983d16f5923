"""Runs a frontend's processes on one listening socket, which the next frontend can take over.

Restarts refuse no connection: the running frontend waits for the next one at a Unix socket, whose abstract
name has the user and the port. It gives both sockets away, so that the name never has to become free. The
next one reports when it serves."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from baton.tcp import is_own

log = logging.getLogger(__name__)

_SOCKETS = b"l"
_SERVING = b"s"
_PAUSE_S = 0.1
TAKE_TIMEOUT_S = 1.0


class Port:
    """This frontend's listening socket, and the `door` at which the next frontend connects for it. `running`
    leads to the frontend that both came from."""

    def __init__(
        self, listener: socket.socket, door: socket.socket | None = None, running: socket.socket | None = None
    ) -> None:
        self.listener = listener
        self._door = door
        self._running = running

    @classmethod
    def taken(cls, number: int) -> "Port | None":
        """The port of this user's running frontend, None if there is none."""
        running = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        running.settimeout(TAKE_TIMEOUT_S)
        try:
            running.connect(_name(number))
            if is_own(running):
                _, descriptors, _, _ = socket.recv_fds(running, 1, 2)
                listener, door = (socket.socket(fileno=descriptor) for descriptor in descriptors)
                return cls(listener, door, running)
        except (OSError, ValueError):  # none runs, or it hangs or ends
            pass
        running.close()
        return None

    @property
    def is_taken(self) -> bool:
        """Whether another frontend serves on it until this one does."""
        return self._running is not None

    async def passed_on(self) -> None:
        """Call when this frontend serves: the one before it drains. Returns when the next one serves."""
        if self._running is not None:
            with suppress(OSError):
                self._running.send(_SERVING)
            self._running.close()
            self._running = None
        if self._door is None:
            self._door = _new_door(self.listener.getsockname()[1])
        with self._door as door:
            door.setblocking(False)
            while not await self._is_passed_on(door):
                pass
        log.info("the next frontend serves: draining")

    def close(self) -> None:
        for each in (self.listener, self._door, self._running):
            if each is not None:
                each.close()

    async def _is_passed_on(self, door: socket.socket) -> bool:
        """Give the sockets to the next frontend; whether it serves then. It may end before."""
        loop = asyncio.get_running_loop()
        try:
            taker, _ = await loop.sock_accept(door)
            with taker:
                if not is_own(taker):
                    return False
                socket.send_fds(taker, [_SOCKETS], [self.listener.fileno(), door.fileno()])
                return await loop.sock_recv(taker, 1) == _SERVING
        except OSError as error:  # it has ended, or there are no descriptors
            log.warning("the port was not handed over error=%s", error)
            await asyncio.sleep(_PAUSE_S)  # a lack of descriptors would fail again at once
            return False


def _new_door(number: int) -> socket.socket:
    """A socket at the name of this port; if the name is in use, one that nobody finds."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.bind(_name(number))
    except OSError as error:
        log.warning("a next frontend cannot take over the port error=%s", error)
        door.bind(b"")  # a name of the kernel's choice
    door.listen()
    return door


def _name(number: int) -> bytes:
    return b"\0baton-frontend-%d-%d" % (os.getuid(), number)


RESTART_S = 1.0
"""The pause before a process that has ended is replaced."""
_READY = b"\0ready"
_VARIABLE = "BATON_FRONTEND_PROCESS"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place in the frontend: its index, the frontend's `folder`, whether the port is being taken
    over, and the listening socket's descriptor. It writes to its standard output when it is ready, and then
    to standard error; its standard input ends with the supervisor."""

    index: int
    folder: str
    takes_over: bool
    listener: int

    @classmethod
    def from_environ(cls) -> "Place | None":
        """This process's place; None if no supervisor started it."""
        text = os.environ.pop(_VARIABLE, None)
        return None if text is None else msgspec.json.decode(text, type=cls)

    @staticmethod
    def report_ready() -> None:
        with suppress(OSError):  # the supervisor has ended
            os.write(sys.stdout.fileno(), _READY)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    @staticmethod
    def watch(on_end: Callable[[], object]) -> None:
        """Call `on_end` when the supervisor has ended."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(sys.stdin)
            on_end()

        loop.add_reader(sys.stdin, end)


class Supervisor:
    """Owns the port, and `num_processes` processes that run `command`, which have a `folder` in common."""

    def __init__(self, port: Port, command: Sequence[str], num_processes: int, folder: str) -> None:
        self._port = port
        self._command = command
        self._num_processes = num_processes
        self._folder = folder
        self._processes: set[asyncio.subprocess.Process] = set()
        self._serves = asyncio.Event()
        self._drains = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then let the processes drain; a second signal kills them. Returns 0
        after a drain, or the status of a process that could not start before any of them served."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._num_processes):
                tasks.create_task(self._keep(index))
            passing = tasks.create_task(self._pass_port_on())
            await self._drains.wait()
            passing.cancel()
            await asyncio.wait([passing])
            self._port.close()
            self._kill(signal.SIGTERM)
        return self._status

    def _on_signal(self, number: signal.Signals) -> None:
        if self._drains.is_set():
            log.warning("forced signal=%s", signal.Signals(number).name)
            self._status = 128 + number
            self._kill(signal.SIGKILL)
        else:
            log.info("draining signal=%s", signal.Signals(number).name)
            self._drains.set()

    def _kill(self, number: signal.Signals) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _pass_port_on(self) -> None:
        await self._serves.wait()
        await self._port.passed_on()
        self._drains.set()

    async def _keep(self, index: int) -> None:
        """Run one process, and another one when it has ended, until the drain."""
        while True:
            try:
                status = await self._run(index)
            except OSError as error:  # out of processes or descriptors
                log.warning("process_not_started process=%d error=%s", index, error)
                status = 1
            if self._drains.is_set():
                return
            log.warning("process_ended process=%d status=%d", index, status)
            if not self._serves.is_set():
                self._status = status if status > 0 else 1
                self._drains.set()
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drains.wait(), RESTART_S)
                return

    async def _run(self, index: int) -> int:
        """Run one process to its end; returns its status."""
        listener = self._port.listener.fileno()
        place = Place(index=index, folder=self._folder, takes_over=self._port.is_taken, listener=listener)
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | {_VARIABLE: msgspec.json.encode(place).decode()},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[listener],
            start_new_session=True,  # Ctrl-C is for the supervisor
        )
        self._processes.add(process)
        if self._drains.is_set():
            process.terminate()
        assert process.stdout is not None, "a pipe"
        with suppress(asyncio.IncompleteReadError):  # it has ended
            await process.stdout.readuntil(_READY)
            log.info("process_ready process=%d pid=%d", index, process.pid)
            self._serves.set()
        status = await process.wait()
        self._processes.remove(process)
        return status
