"""Baton's workers behind Dynamo's own frontend: a registry in a folder, and TCP, by default."""

import json
import re
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import free_port
from tests.stack import MODEL, ROOT, START_TIMEOUT_S, Process, Stack
from tests.waiting import wait_for

_PYTHON = ROOT / ".venv-dynamo/bin/python"
# Dynamo's frontend renders the prompt, without Harmony's tools.
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{m.role}}<|message|>{{m.content}}<|end|>{% endfor %}<|start|>assistant"
)


class Behind(Stack):
    """Workers of Baton's that have a metrics port each, and Dynamo's frontend at `url`."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        ours = {
            "BATON_REQUEST_PLANE": "dynamo",
            "BATON_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "kv"),
            "DYN_LOG": "error",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(folder, ours | dict(environ or {}))
        del self.environ["BATON_FILE_REGISTRY"]
        self.model_path = shutil.copytree(ROOT / "models/demo", folder / "model")
        path = self.model_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
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
