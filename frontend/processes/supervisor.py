"""Runs a frontend's processes: starts them, hands out connections in turn, replaces dead ones, drains."""

import asyncio
import errno
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress

import msgspec

from frontend.processes.takeover import Port

log = logging.getLogger(__name__)

READY = b"r"
_CONNECTION = b"c"
_VARIABLE = "BATON_FRONTEND_PROCESS"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place in the frontend: the frontend's `folder` and listening `address`, the descriptor of
    the process's end of the `channel` to the supervisor, and whether the port is being taken over.
    """

    index: int
    channel: int
    folder: str
    address: tuple[str, int]
    takes_over: bool

    def environ(self) -> dict[str, str]:
        """The variable that the process reads."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def told(cls, environ: MutableMapping[str, str] = os.environ) -> "Place | None":
        """This process's place; None if no supervisor started it."""
        text = environ.pop(_VARIABLE, None)
        return None if text is None else msgspec.json.decode(text, type=cls)


class ProcessEnd:
    """The process's end of the channel: a stand-in for the listening socket at `address`. `on_end` is called
    when the supervisor has gone.
    """

    def __init__(
        self, channel: socket.socket, address: tuple[str, int], on_end: Callable[[], object]
    ) -> None:
        os.set_inheritable(channel.fileno(), False)
        self._channel = channel
        self._address = address
        self._on_end = on_end

    def ready(self) -> None:
        """Tell the supervisor to send connections."""
        try:
            self._channel.send(READY)
        except OSError:
            self._on_end()

    def fileno(self) -> int:
        """For the event loop."""
        return self._channel.fileno()

    def setblocking(self, flag: bool, /) -> None:
        """As a socket's."""
        self._channel.setblocking(flag)

    def getsockname(self) -> tuple[str, int]:
        """The address that the supervisor listens on."""
        return self._address

    def accept(self) -> tuple[socket.socket, None]:
        """The next connection, and no address. Raises OSError like a socket: BlockingIOError if none is
        waiting, EMFILE if one was lost because this process cannot open more files.
        """
        data, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not data:
            self._on_end()
            raise BlockingIOError
        if not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os.set_inheritable(descriptors[0], False)
        return socket.socket(fileno=descriptors[0]), None

    def close(self) -> None:
        """Close this end: the supervisor passes no more connections on."""
        self._channel.close()


def channel() -> tuple[socket.socket, socket.socket]:
    """The two ends, which keep the limits of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def pass_on(connection: socket.socket, channel: socket.socket) -> bool:
    """Pass a connection on, from the supervisor's end; False if the process cannot take it now."""
    try:
        socket.send_fds(channel, [_CONNECTION], [connection.fileno()])
    except OSError:  # its buffer is full, or it is ending
        return False
    return True


RESTART_S = 1.0
"""A process that lived shorter, or was never ready, is restarted after this time."""
_PAUSE_S = 0.1


class Supervisor:
    """Owns the port, and `num_processes` processes that run `command`, which have a `folder` in common."""

    def __init__(self, port: Port, command: Sequence[str], num_processes: int, folder: str) -> None:
        self._port = port
        self._command = command
        self._num_processes = num_processes
        self._folder = folder
        self._processes: set[asyncio.subprocess.Process] = set()
        self._ready: deque[socket.socket] = deque()  # the channels of processes that accept connections
        self._serves = asyncio.Event()
        self._drains = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then let the processes drain; a second signal kills them. Returns 0
        after a drain, or the status of a process that could not start before any of them served.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._num_processes):
                tasks.create_task(self._keep(index))
            serving = [tasks.create_task(self._hand_out()), tasks.create_task(self._pass_port_on())]
            await self._drains.wait()
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)
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

    async def _keep(self, index: int) -> None:
        """Run one process, and another one when it has died, until the drain."""
        while not self._drains.is_set():
            began_s = time.monotonic()
            try:
                was_ready, status = await self._run(index)
            except OSError as error:  # out of processes or descriptors
                log.warning("process_not_started process=%d error=%s", index, error)
                was_ready, status = False, 1
            if self._drains.is_set():
                return
            log.warning("process_ended process=%d status=%d", index, status)
            if not self._serves.is_set():
                self._status = status if status > 0 else 1
                self._drains.set()
            elif not was_ready or time.monotonic() - began_s < RESTART_S:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._drains.wait(), RESTART_S)

    async def _run(self, index: int) -> tuple[bool, int]:
        """Run one process to its end; returns whether it was ready, and its status."""
        ours, theirs = channel()
        with ours:
            with theirs:
                process = await self._start(index, theirs.fileno())
            self._processes.add(process)
            if self._drains.is_set():
                process.terminate()
            ours.setblocking(False)
            is_ready = await self._is_ready(ours)
            if is_ready:
                log.info("process_ready process=%d pid=%d", index, process.pid)
                self._ready.append(ours)
                self._serves.set()
            status = await process.wait()
            self._processes.remove(process)
            if is_ready:
                self._ready.remove(ours)
        return is_ready, status

    async def _start(self, index: int, descriptor: int) -> asyncio.subprocess.Process:
        place = Place(
            index=index,
            channel=descriptor,
            folder=self._folder,
            address=self._port.listener.getsockname()[:2],
            takes_over=self._port.is_taken,
        )
        return await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | place.environ(),
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the supervisor
        )

    async def _is_ready(self, end: socket.socket) -> bool:
        """Wait until a process is ready; False if it ends before."""
        try:
            return await asyncio.get_running_loop().sock_recv(end, 1) == READY
        except OSError:
            return False

    async def _pass_port_on(self) -> None:
        await self._serves.wait()
        await self._port.passed_on()
        self._drains.set()

    async def _hand_out(self) -> None:
        """Accept connections, and give each to the next process that takes it."""
        await self._serves.wait()
        listener = self._port.listener
        listener.setblocking(False)
        while True:
            await asyncio.sleep(0)  # a turn for the rest, however many connections wait
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:  # out of descriptors: connections wait in the queue
                log.warning("accept=paused error=%s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            with connection:
                while not self._taken(connection):  # noqa: ASYNC110  a process does not say that it has room
                    await asyncio.sleep(_PAUSE_S)

    def _taken(self, connection: socket.socket) -> bool:
        for _ in range(len(self._ready)):
            self._ready.rotate(-1)
            if pass_on(connection, self._ready[-1]):
                return True
        return False
