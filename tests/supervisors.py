"""Starts `tests.supervised`, asks its processes, and looks at the supervisor from outside."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import free_port
from tests.stack import Process
from tests.waiting import PATIENCE_S, wait_for


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
