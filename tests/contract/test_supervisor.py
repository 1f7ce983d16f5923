"""A supervisor and its processes: who does not start, who is replaced, how it drains."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frontend.processes.supervisor import Port
from tests.alive import is_running
from tests.conftest import free_port
from tests.stack import Process
from tests.waiting import PATIENCE_S, signal_process, wait_for


class Supervised(Process):
    """A supervisor, and its processes; see `tests.supervised`."""

    def __init__(self, folder: Path, num_processes: int, failure: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "tests.supervised", str(num_processes), str(self.port)]
        super().__init__("supervised", [*command, *filter(None, [failure])], folder / "log", os.environ)

    def wait_logged(self, words: str, num_times: int = 1) -> None:
        wait_for(lambda: self.text().count(words) >= num_times)

    def say(self, words: str) -> socket.socket:
        """A connection with these words; its answer is still to come."""
        client = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        client.sendall(words.encode())
        return client

    def ask(self, words: str = "who") -> tuple[int, int]:
        """Which process answers: its index, and its process id."""
        with self.say(words) as client:
            return answer(client)

    def pids(self) -> list[int]:
        """The process ids of the processes that were ready."""
        return [int(line.rpartition("pid=")[2]) for line in self.text().splitlines() if "pid=" in line]

    @property
    def num_open(self) -> int:
        """The supervisor's descriptors."""
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def answer(client: socket.socket) -> tuple[int, int]:
    index, pid = client.recv(64).split()
    return int(index), int(pid)


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a supervisor, and waits until its processes are ready and it offers its port."""
    started: list[Supervised] = []

    def start(num_processes: int, failure: str = "") -> Supervised:
        started.append(Supervised(tmp_path, num_processes, failure))
        if not failure:
            started[0].wait_logged("process_ready", num_processes)
            started[0].wait_logged("serving")
        return started[0]

    yield start
    for each in started:
        each.kill()  # its processes end with it


def test_keys_pressed_in_a_terminal_reach_only_the_supervisor(start: Start) -> None:
    _, pid = start(1).ask()
    assert os.getpgid(pid) == pid


@pytest.mark.parametrize(
    ("failure", "status", "logged"), [("status", 5, 5), ("exception", 1, 1), ("kill", 1, -9)]
)
def test_a_process_that_does_not_start_ends_the_supervisor(
    failure: str, status: int, logged: int, start: Start
) -> None:
    supervised = start(2, failure)
    assert supervised.wait() == status
    assert f"process_ended process=1 status={logged}\n" in supervised.text()
    assert ("ValueError: spoilt" in supervised.text()) == (failure == "exception")
    assert not supervised.is_listening()


def test_a_drain_lets_processes_finish_and_refuses_connections(start: Start) -> None:
    supervised = start(1)
    with supervised.say("linger") as first:
        answer(first)
        supervised.signal(signal.SIGTERM)
        supervised.wait_logged("draining signal=SIGTERM")
        assert Port.taken(supervised.port) is None
        assert supervised.popen.poll() is None
    assert supervised.wait() == 0
    assert not supervised.is_listening()


def test_a_second_signal_kills(start: Start) -> None:
    supervised = start(1)
    with supervised.say("linger") as lingering:
        _, pid = answer(lingering)
        supervised.signal(signal.SIGTERM)
        supervised.wait_logged("draining")
        supervised.signal(signal.SIGINT)
        assert supervised.wait() == 128 + signal.SIGINT
    assert not is_running(pid)


def test_a_dead_process_is_replaced_while_the_other_serves(start: Start) -> None:
    supervised = start(2)
    num_open = supervised.num_open
    index, pid = supervised.ask("exit 3")
    supervised.wait_logged(f"process_ended process={index} status=3")
    supervised.ask()
    supervised.wait_logged("process_ready", 3)
    wait_for(lambda: supervised.ask()[0] == index)
    assert not is_running(pid)
    assert supervised.text().count("serving") == 1
    wait_for(lambda: supervised.num_open <= num_open)


def test_processes_that_die_together_are_all_replaced(start: Start) -> None:
    supervised = start(2)
    pids = supervised.pids()
    signal_process(supervised.popen.pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, pids)))
    signal_process(supervised.popen.pid, signal.SIGCONT)
    supervised.wait_logged("process_ready", 4)


def test_a_connection_waits_for_the_process_that_replaces_the_only_one(start: Start) -> None:
    supervised = start(1)
    _, pid = supervised.ask("exit 3")
    supervised.wait_logged("process_ended")
    with supervised.say("who") as client:
        assert answer(client)[1] != pid
        assert client.recv(1) == b""  # the process that was made meanwhile has no copy of its own


def test_a_replacement_that_does_not_start_is_tried_again_while_the_other_serves(start: Start) -> None:
    supervised = start(2, "replacements")
    supervised.wait_logged("process_ready", 2)
    index, _ = supervised.ask("exit 3")
    supervised.ask()
    supervised.wait_logged(f"process_ended process={index} status=5", 2)
    supervised.wait_logged("process_ready", 3)
    assert "draining" not in supervised.text()
    supervised.signal(signal.SIGTERM)
    assert supervised.wait() == 0
