"""Runs a frontend's processes: forks them, hands out connections in turn, replaces dead ones, drains."""

import logging
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.telemetry import leave
from frontend.processes.handover import SupervisorEnd, channel
from frontend.processes.takeover import Offer

Serve = Callable[[int, socket.socket], int]
"""Serves connections as the process of that index, from its end of a channel; returns its exit status."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_RESTART_S = 1.0
"""A process that lived shorter, or was never ready, is restarted after this time."""
_PAUSE_S = 0.1
_ACCEPTS_A_TURN = 16

log = logging.getLogger(__name__)


class _Child:
    """One process."""

    def __init__(self, index: int, pid: int, end: SupervisorEnd) -> None:
        self.index = index
        self.pid = pid
        self.end = end
        self.was_ready = False
        self.began_s = time.monotonic()


class Supervisor:
    """Owns the listening socket and `num_processes` processes that run `serve`. It has one thread and no
    event loop, so that it can fork at any time.
    """

    def __init__(
        self, listener: socket.socket, num_processes: int, serve: Serve, listening: Callable[[], object]
    ) -> None:
        """`listening` is called once, when the first process serves."""
        listener.setblocking(False)
        self._listener = listener
        self._num_processes = num_processes
        self._serve = serve
        self._listening = listening
        self._offer = Offer(listener, self._watch, self._drain)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        self._due_s: dict[int, float] = {}  # when processes that died are started again
        self._turn = 0
        self._accepts_from_s: float | None = None
        self._held: socket.socket | None = None  # accepted while no process could take it
        self._is_draining = False
        self._status = 0

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, then let the processes drain; a second signal kills them. Returns 0
        after a drain, or the status of a process that could not start before any of them served.
        """
        with _signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._on_signals(wakeup))
            for index in range(self._num_processes):
                self._start(index)
            while self._children or self._due_s:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._on_time(time.monotonic())
        self._selector.close()
        return self._status

    def _start(self, index: int) -> None:
        ours, theirs = channel()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become(index, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        child = self._children[pid] = _Child(index, pid, SupervisorEnd(ours))
        self._selector.register(child.end, selectors.EVENT_READ, lambda: self._on_message(child))

    def _become(self, index: int, end: socket.socket) -> None:
        """Be the new process; never returns."""
        status = 1
        try:
            os.setpgid(0, 0)  # Ctrl-C is for the supervisor
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._selector.close()
            self._listener.close()
            for child in self._children.values():
                child.end.close()
            self._offer.disown()
            if self._held is not None:  # a copy would keep it open after its process has closed it
                self._held.close()
            status = self._serve(index, end)
        except BaseException:  # noqa: BLE001  the process's edge: it must not go on as a supervisor
            traceback.print_exc()
        finally:
            leave(status)

    def _on_signals(self, wakeup: socket.socket) -> None:
        numbers = set(wakeup.recv(64))
        if signal.SIGCHLD in numbers:
            self._reap()
        for number in numbers & {signal.SIGTERM, signal.SIGINT}:
            if self._is_draining:
                log.warning("forced signal=%s", signal.Signals(number).name)
                self._status = 128 + number
                self._kill(signal.SIGKILL)
            else:
                log.info("draining signal=%s", signal.Signals(number).name)
                self._drain()

    def _watch(self, readable: socket.socket, callback: Callable[[], object] | None) -> None:
        if callback is None:
            self._selector.unregister(readable)
        else:
            self._selector.register(readable, selectors.EVENT_READ, callback)

    def _drain(self) -> None:
        self._is_draining = True
        self._offer.close()
        self._due_s.clear()
        self._pause(None)
        self._listener.close()
        if self._held is not None:
            self._held.close()
        self._kill(signal.SIGTERM)

    def _kill(self, number: signal.Signals) -> None:
        for pid in self._children:
            os.kill(pid, number)  # not reaped yet, so it is still ours

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._on_exit(self._children.pop(pid), os.waitstatus_to_exitcode(status))

    def _on_exit(self, child: _Child, status: int) -> None:
        if self._is_draining:
            return
        log.warning("process_ended process=%d status=%d", child.index, status)
        if not self._offer.is_open:  # no process has served yet
            self._status = status if status > 0 else 1
            self._drain()
            return
        now_s = time.monotonic()
        is_old = child.was_ready and now_s - child.began_s > _RESTART_S
        self._due_s[child.index] = now_s if is_old else now_s + _RESTART_S

    def _on_message(self, child: _Child) -> None:
        if not child.end.receive():
            self._selector.unregister(child.end)
            child.end.close()
        elif not child.was_ready:
            child.was_ready = True
            log.info("process_ready process=%d pid=%d", child.index, child.pid)
            if self._is_draining:
                return
            self._resume()
            if not self._offer.is_open:
                self._offer.open()
                self._listening()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection = self._held or self._listener.accept()[0]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # out of descriptors: connections wait in the backlog
                log.warning("accept=paused error=%s", error)
                self._pause(time.monotonic() + _PAUSE_S)
                return
            if not self._hand_out(connection):
                self._held = connection
                self._pause(time.monotonic() + _PAUSE_S)
                return
            self._held = None
            connection.close()

    def _hand_out(self, connection: socket.socket) -> bool:
        """Give the connection to the next process that takes it; False if none does."""
        children = [child for child in self._children.values() if child.end.is_ready]
        for _ in children:
            self._turn += 1
            if children[self._turn % len(children)].end.pass_on(connection):
                return True
        return False

    def _pause(self, until_s: float | None) -> None:
        self._accepts_from_s = until_s
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def _resume(self) -> None:
        self._accepts_from_s = None
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if self._held is not None:  # no later connection needs to come for it
            self._accept()

    def _timeout_s(self) -> float | None:
        times_s = [*self._due_s.values(), *([self._accepts_from_s] if self._accepts_from_s else [])]
        return max(min(times_s) - time.monotonic(), 0.0) if times_s else None

    def _on_time(self, now_s: float) -> None:
        if self._accepts_from_s is not None and now_s >= self._accepts_from_s:
            self._resume()
        for index in [index for index, due_s in self._due_s.items() if now_s >= due_s]:
            del self._due_s[index]
            self._start(index)


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that gets the numbers of this process's signals."""
    read, write = socket.socketpair()
    write.setblocking(False)
    earlier = {number: signal.signal(number, lambda _number, _frame: None) for number in _SIGNALS}
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    try:
        yield read
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        read.close()
        write.close()
