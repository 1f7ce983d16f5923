"""Faults of whole processes: killed, frozen, slow, hung, drained, replaced."""

import signal
import threading
import time
from pathlib import Path

from tests.alive import is_running
from tests.chaos.injector import Injector, require
from tests.chaos.scene import WORKERS, Scene
from tests.chaos.schedule import Targets
from tests.stack import Process
from tests.waiting import signal_process, thread_states, wait_for

_PULSE_S, _STOPPED_SHARE = 0.1, 0.8


def cpu_ticks(pid: int) -> int:
    """The CPU time of a process, as in proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


class Kill:
    """SIGKILL; started again at the end."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._scene = scene
        self._targets = targets
        self._processes = [scene.processes[name] for name in targets]

    def begin(self) -> None:
        for process in self._processes:
            process.popen.kill()
        for process in self._processes:
            process.popen.wait()

    def proof(self) -> str:
        for process in self._processes:
            require(process.popen.returncode == -signal.SIGKILL, f"{process.name} ended by itself")
            require(not is_running(process.popen.pid), f"{process.name} is running")
        return "exit status -9, no such process"

    def end(self) -> None:
        for name in self._targets:
            self._scene.start(name)


class Freeze:
    """SIGSTOP, then SIGCONT."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._pids = [scene.processes[name].popen.pid for name in targets]
        self._ticks: list[int] = []

    def begin(self) -> None:
        for pid in self._pids:
            signal_process(pid, signal.SIGSTOP)
        self._ticks = [cpu_ticks(pid) for pid in self._pids]

    def proof(self) -> str:
        for pid in self._pids:
            require(thread_states(pid) == {"T"}, f"threads of {pid} are not stopped")
        require([cpu_ticks(pid) for pid in self._pids] == self._ticks, "it went on meanwhile")
        return "all threads in state T, no CPU time used"

    def end(self) -> None:
        for pid in self._pids:
            signal_process(pid, signal.SIGCONT)


class Slow:
    """Stopped for most of each tenth of a second."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._pids = [scene.processes[name].popen.pid for name in targets]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._pulse)
        self._stopped_s = 0.0
        self._began_s = 0.0

    def begin(self) -> None:
        self._began_s = time.monotonic()
        self._thread.start()

    def proof(self) -> str:
        share = self._stopped_s / (time.monotonic() - self._began_s)
        require(share > 0.5, f"all threads in state T for {share:.0%} of the time only")
        return f"all threads in state T for {share:.0%} of the time"

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _pulse(self) -> None:
        while not self._ending.is_set():
            for pid in self._pids:
                signal_process(pid, signal.SIGSTOP)  # returns when all threads are stopped
            stopped_s = time.monotonic()
            self._ending.wait(_PULSE_S * _STOPPED_SHARE)
            self._stopped_s += time.monotonic() - stopped_s
            for pid in self._pids:
                signal_process(pid, signal.SIGCONT)
            self._ending.wait(_PULSE_S * (1 - _STOPPED_SHARE))


class HangEngine:
    """The engine stands still while its worker sends heartbeats."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._scene = scene
        self._files = [scene.hang_file(name) for name in targets]
        self._ids = [scene.worker_id(name) for name in targets]

    def begin(self) -> None:
        for file in self._files:
            file.touch()

    def proof(self) -> str:
        wait_for(lambda: set(self._ids) <= set(self._scene.stack.health().get("stuck", [])))
        return "stuck in /health, although it sends heartbeats"

    def end(self) -> None:
        for file in self._files:
            file.unlink()


class Drain(Kill):
    """SIGTERM, and a new process once the old one has finished what it held."""

    def begin(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGTERM)

    def proof(self) -> str:
        return _drained(self._processes)


class Roll(Injector):
    """Every worker is replaced, one after the other: a new one joins, then the old one drains."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._scene = scene
        self._targets = targets
        self._old: list[Process] = []

    def begin(self) -> None:
        for name in self._targets:
            self._old.append(old := self._scene.processes[name])
            self._scene.start(name)
            self._scene.wait_recovered(len(WORKERS) + 1)
            old.signal(signal.SIGTERM)
            self._scene.wait_recovered()

    def proof(self) -> str:
        return _drained(self._old)


class TakeOver(Injector):
    """A new frontend takes the port over while the old one drains."""

    def __init__(self, scene: Scene, _: Targets) -> None:
        self._scene = scene
        self._old = scene.processes["frontend"]
        self._new: Process | None = None

    def begin(self) -> None:
        self._new = self._scene.stack.next_frontend(*self._scene.patient)
        self._scene.processes["frontend"] = self._new

    def proof(self) -> str:
        drained = _drained([self._old])
        require(self._new is not None and self._new.popen.poll() is None, "the new frontend ended")
        return drained


def _drained(processes: list[Process]) -> str:
    for process in processes:
        status = process.wait()
        require(status == 0, f"{process.name} ended with {status}")
    return "the old process exited with 0"
