"""A whole stack of real processes for the system tests: start, observe, kill, freeze, drain."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tests.conftest import free_port
from tests.waiting import PATIENCE_S, scaled, signal_process, wait_for

ROOT = Path(__file__).parents[1]
MODEL = "openai/gpt-oss-120b"
START_TIMEOUT_S = 180.0
# Tests of client packages run in a separate venv; the servers use Baton's.
PYTHON = os.environ.get("STACK_PYTHON", sys.executable)


class Process:
    """One Baton process, with its output in `log`."""

    def __init__(self, name: str, command: list[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=out, env=dict(environ), cwd=ROOT)

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM, SIGSTOP, SIGCONT."""
        signal_process(self.popen.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status; `timeout_s` is scaled."""
        return self.popen.wait(scaled(timeout_s))

    def text(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def listening(self) -> list[tuple[str, int]]:
        """Addresses, in the kernel's hex, and ports of the IPv4 sockets that it listens on."""
        folder = Path(f"/proc/{self.popen.pid}")
        links = map(os.path.realpath, (folder / "fd").iterdir())  # some may be closed meanwhile
        inodes = {link.rpartition("socket:[")[2][:-1] for link in links}
        rows = [row.split() for row in (folder / "net/tcp").read_text().splitlines()[1:]]
        places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in inodes]
        return [(address, int(port, 16)) for address, port in places]

    @property
    def rss_bytes(self) -> int:
        """Resident memory."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024


class Stack:
    """A frontend and workers on loopback; file registry and TCP unless `environ` says otherwise. `prefix` is
    put before the command of each process started later."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.closing: list[Callable[[], None]] = []
        self.prefix: tuple[str, ...] = ()
        self.url = f"http://127.0.0.1:{free_port()}"
        self.environ = {
            **os.environ,
            "BATON_DISCOVERY_BACKEND": "file",
            "BATON_REQUEST_PLANE": "tcp",
            "BATON_FILE_REGISTRY": str(folder / "registry"),
            "BATON_RESPONSE_STORE": str(folder / "responses.sqlite3"),
            "BATON_CURRENT_DATE": "2026-11-21",  # answers depend on it
            "BATON_LIVENESS_S": str(scaled(5.0)),  # a machine that stands still for a moment is no fault
            **(environ or {}),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The frontend's."""
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, headers: Mapping[str, str] | None = None, **body: Any) -> httpx.Response:
        """A request for the model, on a connection of its own."""
        # Without certificates, which take 45 ms of CPU to load.
        return httpx.post(
            f"{self.url}{path}",
            json={"model": MODEL} | body,
            headers=headers,
            timeout=PATIENCE_S,
            verify=False,
        )

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer with status 200."""
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def get(self, path: str) -> httpx.Response:
        """A GET on a connection of its own."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S, verify=False)

    def start(self, name: str, module: str, *arguments: str) -> Process:
        """`python -m MODULE ARGUMENTS`."""
        command = [*self.prefix, PYTHON, "-m", module, *arguments]
        process = Process(name, command, self.folder / f"{name}.log", self.environ)
        self.processes.append(process)
        return process

    def frontend(self, *arguments: str) -> Process:
        """The frontend at `url`."""
        return self.start("frontend", "frontend", "--http-port", str(self.port), *arguments)

    def next_frontend(self, *arguments: str) -> Process:
        """Another frontend at `url`, which takes the port over."""
        return self.start(
            "next-frontend", "frontend", "--http-port", str(self.port), "--take-over", *arguments
        )

    def another_frontend(self, *arguments: str) -> tuple[Process, str]:
        """One more frontend of the same workers, ready: process and URL."""
        port = free_port()
        name = f"frontend-{len(self.processes)}"
        process = self.start(name, "frontend", "--http-port", str(port), *arguments)
        wait_for(lambda: _health(f"http://127.0.0.1:{port}").get("status") == "healthy", START_TIMEOUT_S)
        return process, f"http://127.0.0.1:{port}"

    def worker(
        self,
        mode: str,
        *flags: str,
        engine: str = "mocker",
        yaml: Path | None = None,
        name: str = "",
        model_path: str = "models/demo",
    ) -> Process:
        """A worker with the demo model; `yaml` in place of the mocker's or the demo's."""
        demo = ROOT / "engine_configs/demo"
        yaml = yaml or demo / ("mocker.yaml" if engine == "mocker" else f"{mode}.yaml")
        arguments = ["--engine", engine, "--model-path", model_path, "--served-model-name", MODEL]
        arguments += ["--disaggregation-mode", mode, "--extra-engine-args", str(yaml)]
        name = name or f"{mode}-{len(self.processes)}"
        return self.start(name, "workers", "--name", name, *arguments, *flags)

    def serve(self, *modes: str, flags: Sequence[str] = (), **options: Any) -> list[Process]:
        """A frontend with these flags and workers of these modes and `options`, ready: the workers."""
        self.frontend(*flags)
        workers = [self.worker(mode, **options) for mode in modes]
        self.wait_ready(modes.count("prefill"), len(modes) - modes.count("prefill"))
        return workers

    def wait_ready(self, num_prefill: int, num_decode: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until that many workers of each role are live and a request can be served.

        A stack that does not become ready is stopped, since a failing fixture has no teardown."""

        def ready() -> bool:
            for process in self.processes:
                assert process.popen.poll() in (None, 0, -9), (
                    f"{process.name} died:\n{process.text()[-3000:]}"
                )
            health = self.health()
            roles = [instance["role"] for instance in health.get("instances", [])]
            is_served = health.get("status") == "healthy" or not num_decode
            return is_served and (roles.count("prefill"), roles.count("decode")) == (num_prefill, num_decode)

        with ExitStack() as failing:
            failing.callback(self.stop)
            wait_for(ready, timeout_s)
            failing.pop_all()

    def health(self) -> dict[str, Any]:
        """The body of /health; empty while the frontend does not listen."""
        return _health(self.url)

    def gauge(self, *names: str, role: str = "") -> float:
        """The sum of gauges over all workers, or those of one role, once each has reported them."""
        found: list[tuple[str, str]] = []
        pattern = rf'^(?:{"|".join(names)})\{{[^}}]*role="(\w+)"[^}}]*\}} (\S+)$'

        def is_reported_by_all() -> bool:
            found[:] = re.findall(pattern, self.get("/metrics").text, re.MULTILINE)
            return len(found) == len(names) * len(self.health()["instances"]) > 0

        wait_for(is_reported_by_all)
        return sum(float(value) for of_role, value in found if role in ("", of_role))

    def spent(self, name: str, label: str = "") -> tuple[float, int]:
        """Sum and count of one of the frontend's histograms, all series together that have this label."""
        text = self.get("/metrics").text
        total, num = (
            sum(map(float, re.findall(rf"^{name}_{part}(?:{{.*{label}.*}})? (\S+)$", text, re.MULTILINE)))
            for part in ("sum", "count")
        )
        return total, round(num)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no request runs and no block is used or pinned on any worker."""
        held = ("worker_running_requests", "worker_waiting_requests", "kv_used_blocks", "kv_pinned_blocks")
        wait_for(lambda: not self.gauge(*(f"baton_{name}" for name in held)), timeout_s)

    def stop(self) -> None:
        """Close the clients that tests opened (`closing`) and kill running processes."""
        for close in self.closing:
            close()
        for process in self.processes:
            process.popen.kill()
        for process in self.processes:
            process.popen.wait()


def _health(url: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = httpx.get(f"{url}/health", verify=False).json()
    except httpx.TransportError:
        return {}
    return found


def damaged_model(folder: Path) -> str:
    """The demo model in this folder, with its last megabyte of weights zero."""
    shutil.copytree(ROOT / "models/demo", folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-(1 << 20) :] = bytes(1 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@contextmanager
def running_stack(
    folder: Path, engine: str = "embedded", environ: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """One prefill and one decode worker, ready."""
    with Stack(folder, environ) as stack:
        stack.serve("prefill", "decode", engine=engine)
        yield stack


def cluster(etcd_url: str, nats_url: str) -> dict[str, str]:
    """The variables of processes that use etcd and NATS."""
    return {
        "BATON_DISCOVERY_BACKEND": "etcd",
        "BATON_REQUEST_PLANE": "nats",
        "ETCD_ENDPOINTS": etcd_url,
        "NATS_SERVER": nats_url,
    }
