"""Containers as processes on loopback: their names, ports and folders are mapped to this machine's."""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.image import environment_of
from tests.stack import MODEL, ROOT, Process
from tests.waiting import PATIENCE_S, wait_for

DEPLOY = ROOT / "deploy"
CLUSTER = {"etcd": "2379", "nats": "4222"}
PORTS = ("2379", "2380", "4222", "8222", "8000")


@dataclass(frozen=True)
class Container:
    """A command line, its variables, and the Dockerfile's stage that it runs in, if it is ours."""

    command: list[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    stage: str | None = None


class Containers:
    """Those of `known` that were started."""

    def __init__(self, folder: Path, known: Mapping[str, Container]) -> None:
        self._folder = folder
        self._known = known
        self._ports = {port: str(free_port()) for port in PORTS}
        self._processes: list[Process] = []
        self._environs: dict[str, dict[str, str]] = {}

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self._ports[port]}"

    def start(self, name: str) -> None:
        """The container's exact command and environment, and its image's environment."""
        container, tmp = self._known[name], self._folder / f"tmp-{len(self._processes)}"
        tmp.mkdir()
        environ = (environment_of(container.stage) if container.stage else {}) | dict(container.environ)
        environ = {key: self._here(re.sub("^/tmp", str(tmp), value)) for key, value in environ.items()}
        program = container.command[0]
        found = sys.executable if program == "python3" else shutil.which(Path(program).name)
        assert found is not None
        line = [found, *(self._here(word) for word in container.command[1:])]
        environ = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin",
            "HOME": str(tmp),
            "PYTHONPATH": "tests/doubles",
        } | environ
        self._processes.append(Process(name, line, self._folder / f"{name}.log", environ))
        self._environs[name] = environ
        if name in CLUSTER:  # the others depend on its health
            wait_for(lambda: self._listens(CLUSTER[name]))

    def _here(self, word: str) -> str:
        folders = {"/etc/nats": str(DEPLOY), "/var/lib": str(self._folder), "=/data": f"={self._folder}/nats"}
        word = re.sub(r"(^|=)/model$", r"\1models/demo", word)
        for there, here in folders.items():
            word = word.replace(there, here)
        word = re.sub(r"0\.0\.0\.0|(?<=//)(etcd|nats)(?=:)", "localhost", word)
        return re.sub(r"\b(" + "|".join(PORTS) + r")\b", lambda match: self._ports[match[1]], word)

    def _listens(self, port: str) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self._ports[port]))) == 0

    def roles(self) -> list[str]:
        """The roles of the workers that the frontend shows; fails the test if a process has ended."""
        for process in self._processes:
            assert process.popen.poll() is None, f"{process.name} ended:\n{process.text()[-2000:]}"
        try:
            health = httpx.get(f"{self.url('8000')}/health", verify=False).json()
        except httpx.TransportError:
            return []
        return sorted(instance["role"] for instance in health["instances"])

    def answers(self, path: str) -> bool:
        """Whether the frontend answers 200."""
        try:
            return httpx.get(f"{self.url('8000')}{path}").status_code == 200
        except httpx.TransportError:
            return False

    def succeeds(self, name: str, command: list[str]) -> bool:
        """Whether a command ends well in a container."""
        words = [self._here(word) for word in command]
        ended = subprocess.run(words, env=self._environs[name], check=False, capture_output=True)
        return ended.returncode == 0

    def num_handoffs(self) -> float:
        """How many handoffs the prefill worker has made."""
        page = httpx.get(f"{self.url('8000')}/metrics").text
        found = re.search(r'^baton_handoffs_total\{role="prefill",[^}]+\} (\S+)$', page, re.MULTILINE)
        assert found
        return float(found[1])

    def check_chat(self) -> None:
        """A chat request is answered, by a handoff."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}
        num_before = self.num_handoffs()
        answer = httpx.post(f"{self.url('8000')}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0
        assert self.num_handoffs() == num_before + 1

    def stop(self) -> None:
        """Kill all."""
        for process in reversed(self._processes):
            process.kill()


@contextmanager
def serving(folder: Path, known: Mapping[str, Container]) -> Iterator[Containers]:
    """All of them, once the frontend has a worker of each role."""
    containers = Containers(folder, known)
    try:
        for name in known:
            containers.start(name)
        wait_for(lambda: containers.roles() == ["decode", "prefill"])
        yield containers
    finally:
        containers.stop()
