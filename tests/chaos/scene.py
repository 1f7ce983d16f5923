"""The processes that chaos happens to: a frontend, workers and brokers on one plane, by name."""

import contextlib
import shutil
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.network import Host, Network
from tests.stack import Process, Stack
from tests.waiting import scaled, wait_for

PLANES = ("tcp+files", "nats+etcd")
PREFILLS, DECODES = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
WORKERS = PREFILLS + DECODES
BROKERS = ("nats", "etcd")
START_S = {"mocker": 10.0, "embedded": 60.0}
"""Until a new process of that engine serves, while others start; four that load torch take a minute."""
_READY = {"nats": "Server is ready", "etcd": "ready to serve client requests"}
_LEAKS = ("worker_running_requests", "worker_waiting_requests", "kv_used_blocks", "kv_pinned_blocks")


def brokers_of(plane: str) -> tuple[str, ...]:
    """Empty if it needs none."""
    return BROKERS if plane == "nats+etcd" else ()


class Scene:
    """A stack on one of the PLANES. With a `network`, each worker and broker is on a host with its name.
    `preload` is a shared library that all Baton processes load."""

    def __init__(
        self, folder: Path, plane: str, engine: str, network: Network | None, preload: Path | None = None
    ) -> None:
        self.folder = folder
        self.plane = plane
        self.engine = engine
        self.network = network
        self.processes: dict[str, Process] = {}
        self.brokers = brokers_of(plane)
        self._ports = {name: free_port() for name in (*BROKERS, "etcd-peer")}
        self.stack = Stack(folder, self._environ(preload))
        del self.stack.environ["BATON_LIVENESS_S"]  # as it is shipped

    def __enter__(self) -> "Scene":
        with contextlib.ExitStack() as failing:
            failing.callback(self.stack.stop)
            for name in (*self.brokers, "frontend", *WORKERS):
                self.start(name)
            self.wait_recovered()
            failing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.stop()

    def start(self, name: str) -> Process:
        """A new process with this name; the earlier one, if there is any, is forgotten."""
        old = self.processes.get(name)
        if old is not None and old.popen.poll() is not None:
            self.stack.processes.remove(old)
        if name == "frontend":
            process = self.stack.frontend(*self.patient)
        elif name in BROKERS:
            process = self._broker(name)
        else:
            process = self._worker(name)
        self.processes[name] = process
        return process

    @property
    def patient(self) -> tuple[str, str]:
        """A frontend's flag: streams wait for as long as a restart takes."""
        return "--wait-for-worker-s", f"{scaled(START_S[self.engine] + 5.0):.0f}"

    def hang_file(self, name: str) -> Path:
        """The mocker of this worker hangs while it exists."""
        return self.folder / f"{name}.hang"

    def worker_id(self, name: str) -> str:
        """As it is registered now."""
        return self.processes[name].text().rpartition("ready worker=")[2].split()[0]

    def etcd_url(self) -> str:
        return f"http://{self._host('etcd').address}:{self._ports['etcd']}"

    def wait_recovered(self, num_workers: int = len(WORKERS)) -> None:
        """Wait until all workers serve again; fails if they do not."""

        def is_whole() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                health = self.stack.health()
                return len(health.get("instances", ())) == num_workers and not any(
                    health[name] for name in ("lost", "stuck", "cut_pairs", "missing")
                )
            return False

        wait_for(is_whole, 120.0)

    def orphans(self) -> dict[str, float]:
        """What is still running or pinned although all clients have ended; empty if nothing is."""
        with contextlib.suppress(AssertionError):
            self.stack.wait_idle(20.0)
            return {}
        return {name: value for name in _LEAKS if (value := self.stack.gauge(f"baton_{name}"))}

    def _environ(self, preload: Path | None) -> dict[str, str]:
        environ = {"LD_PRELOAD": str(preload), "CHAOS_CLOCK": str(self.clock_file())} if preload else {}
        if self.brokers:
            nats_url = f"nats://{self._host('nats').address}:{self._ports['nats']}"
            environ |= {"BATON_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": self.etcd_url()}
            environ |= {"BATON_REQUEST_PLANE": "nats", "NATS_SERVER": nats_url}
        return environ

    def _host(self, name: str) -> Host:
        return self.network.hosts[name] if self.network else Host("127.0.0.1", ())

    def clock_file(self) -> Path:
        """The seconds by which all Baton processes' wall clocks are wrong, 8 bytes."""
        return self.folder / "clock"

    def _broker(self, name: str) -> Process:
        path = shutil.which(name if name == "etcd" else "nats-server")
        assert path is not None, f"{name} is not on the PATH: make servers"
        log, host = self.folder / f"{name}.log", self._host(name)
        if name == "nats":
            command = [*host.prefix, path, "-a", host.address, "-p", str(self._ports["nats"])]
        else:
            peer = f"http://127.0.0.1:{self._ports['etcd-peer']}"
            command = [*host.prefix, path, f"--data-dir={self.folder / 'etcd'}", f"--listen-peer-urls={peer}"]
            command += [f"--listen-client-urls={self.etcd_url()}"]
            command += [f"--advertise-client-urls={self.etcd_url()}"]
            command += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
        before = log.stat().st_size if log.exists() else 0
        process = Process(name, command, log, self.stack.environ)
        self.stack.processes.append(process)
        wait_for(lambda: _READY[name].encode() in log.read_bytes()[before:])
        return process

    def _worker(self, name: str) -> Process:
        yaml = None
        if self.engine == "mocker":
            yaml = self.folder / f"{name}.yaml"
            yaml.write_text(f"hang_while: {self.hang_file(name)}\n")
        if self.network is not None:
            self.stack.environ["BATON_HOST"], self.stack.prefix = self.network.hosts[name]
        try:
            return self.stack.worker(name.partition("-")[0], engine=self.engine, yaml=yaml, name=name)
        finally:
            self.stack.prefix = ()
            self.stack.environ.pop("BATON_HOST", None)
