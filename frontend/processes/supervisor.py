"""Runs a frontend's processes: starts them, hands out connections in turn, replaces dead ones, drains."""

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from frontend.processes.handover import READY, Place, channel, pass_on
from frontend.processes.takeover import Port

RESTART_S = 1.0
"""A process that lived shorter, or was never ready, is restarted after this time."""
_PAUSE_S = 0.1

log = logging.getLogger(__name__)


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
