"""Runs a frontend's processes, which accept from one socket: starts them, replaces dead ones, drains them."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress

import msgspec

from frontend.processes.takeover import Port

log = logging.getLogger(__name__)

RESTART_S = 1.0
"""The pause before a process that has ended is replaced."""
_READY = b"r"
_VARIABLE = "BATON_FRONTEND_PROCESS"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A process's place in the frontend: its index, the frontend's `folder`, whether the port is being taken
    over, and the descriptors of the listening socket and of the process's end of a channel to the supervisor.
    """

    index: int
    folder: str
    takes_over: bool
    listener: int
    channel: int

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str] = os.environ) -> "Place | None":
        """This process's place; None if no supervisor started it."""
        text = environ.pop(_VARIABLE, None)
        return None if text is None else msgspec.json.decode(text, type=cls)

    def report_ready(self) -> None:
        """Report that this process accepts connections."""
        with suppress(OSError):  # the supervisor has ended
            os.write(self.channel, _READY)

    def watch(self, on_end: Callable[[], object]) -> None:
        """Call `on_end` when the supervisor has ended."""
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.remove_reader(self.channel)
            on_end()

        loop.add_reader(self.channel, end)


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
        after a drain, or the status of a process that could not start before any of them served.
        """
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
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await self._start(index, theirs.fileno())
            self._processes.add(process)
            if self._drains.is_set():
                process.terminate()
            ours.setblocking(False)
            if await asyncio.get_running_loop().sock_recv(ours, 1) == _READY:
                log.info("process_ready process=%d pid=%d", index, process.pid)
                self._serves.set()
            status = await process.wait()
        self._processes.remove(process)
        return status

    async def _start(self, index: int, channel: int) -> asyncio.subprocess.Process:
        listener = self._port.listener.fileno()
        place = Place(
            index=index,
            folder=self._folder,
            takes_over=self._port.is_taken,
            listener=listener,
            channel=channel,
        )
        return await asyncio.create_subprocess_exec(
            *self._command,
            env=os.environ | {_VARIABLE: msgspec.json.encode(place).decode()},
            pass_fds=[listener, channel],
            start_new_session=True,  # Ctrl-C is for the supervisor
        )
