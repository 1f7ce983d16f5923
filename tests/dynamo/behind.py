"""Baton's workers behind Dynamo's own frontend: a registry in a folder, and TCP, by default."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import free_port
from tests.dynamo_stack import DynamoStack, templated_model
from tests.stack import MODEL, ROOT, START_TIMEOUT_S, Process
from tests.waiting import wait_for

_PYTHON = ROOT / ".venv-dynamo/bin/python"


class Behind(DynamoStack):
    """Workers of Baton's that have a metrics port each, and Dynamo's frontend at `url`."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, {"HF_HUB_OFFLINE": "1"} | dict(environ or {}))
        self.model_path = templated_model(folder)
        self.ports: dict[str, int] = {}

    def dynamos_frontend(self, *flags: str) -> Process:
        """Dynamo's frontend. Its registry and plane are this stack's."""
        if not _PYTHON.exists():
            pytest.fail("there is no .venv-dynamo: run make test-dynamo")
        environ = {name: value for name, value in self.environ.items() if not name.startswith("PYTHON")}
        environ["DYN_TCP_RESPONSE_STREAM_HOST"] = "127.0.0.1"
        backend = environ["BATON_DISCOVERY_BACKEND"]
        wires = ["--discovery-backend", backend, "--request-plane", environ.get("DYN_REQUEST_PLANE", "tcp")]
        command = [str(_PYTHON), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(self.port), *wires, *flags]
        process = Process("dynamo", command, self.folder / "dynamo.log", environ)
        self.processes.append(process)
        return process

    def own(self, mode: str, max_seq_len: int = 4096, **options: Any) -> Process:
        """A worker of Baton's."""
        port = self.environ["DYN_SYSTEM_PORT"] = str(free_port())
        worker = self.worker(
            mode, "--max-seq-len", str(max_seq_len), model_path=str(self.model_path), **options
        )
        self.ports[worker.name] = int(port)
        return worker

    def behind(self, *modes: str, flags: tuple[str, ...] = (), **options: Any) -> list[Process]:
        """Dynamo's frontend with these flags, and workers of these modes, which serve: the workers."""
        self.dynamos_frontend(*flags)
        workers = [self.own(mode, **options) for mode in modes]
        for worker in workers:
            wait_for(partial(_is_ready, worker), START_TIMEOUT_S)
        self.wait_served()
        return workers

    def wait_served(self) -> None:
        """Wait until Dynamo's frontend answers a request."""
        wait_for(lambda: _status(f"{self.url}/v1/models") == 200, START_TIMEOUT_S)
        wait_for(lambda: self.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200)

    def figure(self, worker: Process, name: str) -> float:
        """One of the worker's figures, at Dynamo's metrics port."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[worker.name]}/metrics").text
        found = re.search(rf"^baton_worker_{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def wait_idle_workers(self, *workers: Process) -> None:
        """Wait until they run nothing and hold no KV."""
        held = ("num_running", "num_waiting", "kv_used_blocks", "kv_pinned_blocks")
        wait_for(lambda: not any(self.figure(worker, name) for worker in workers for name in held))

    def chat(self, text: str, **body: Any) -> httpx.Response:
        """One user message to Dynamo's frontend."""
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)


def _is_ready(worker: Process) -> bool:
    return " ready worker=" in worker.text()


def _status(url: str) -> int:
    try:
        answer = httpx.get(url)
    except httpx.TransportError:
        return 0
    return answer.status_code if MODEL in answer.text else 0
