"""The measured servers: Baton, and NVIDIA Dynamo, each with a frontend, a prefill and a decode mocker."""

import dataclasses
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.conftest import ServerProcess, free_port
from tests.stack import MODEL, Process, Stack
from tests.waiting import wait_for

_DEMO = Path("models/demo")
_PEER_PYTHON = Path(".venv-dynamo/bin/python")
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{m.role}}<|message|>{{m.content}}<|end|>{% endfor %}<|start|>assistant"
)


@dataclasses.dataclass(frozen=True)
class Running:
    """A server under load: its base URL, and its processes by name."""

    url: str
    pids: dict[str, int]


@contextmanager
def baton(folder: Path, plane: str, step_ms: float, num_processes: int = 1) -> Iterator[Running]:
    """Frontend, of so many processes, and workers over etcd and the plane."""
    with ExitStack() as stopping:
        etcd = _etcd(folder, stopping)
        environ = {
            "BATON_DISCOVERY_BACKEND": "etcd",
            "ETCD_ENDPOINTS": etcd.url,
            "BATON_REQUEST_PLANE": plane,
        }
        if plane == "nats":
            environ["NATS_SERVER"] = _nats(folder, stopping).url
        stack = Stack(folder, environ)
        stopping.callback(stack.stop)
        yaml = folder / "mocker.yaml"
        instant = "prefill_tokens_per_s: 1.0e+9\nkv_transfer_ms: 0\nmax_batch_size: 1024\n"
        yaml.write_text(f"{instant}decode_step_ms: {step_ms}\n")
        stack.frontend("--log-level", "warning", "--num-processes", str(num_processes))
        stack.worker("prefill", yaml=yaml), stack.worker("decode", yaml=yaml)
        stack.wait_ready(1, 1)
        names = ("frontend", "prefill", "decode")
        pids = {name: each.popen.pid for name, each in zip(names, stack.processes, strict=True)}
        yield Running(stack.url, pids)


@contextmanager
def dynamo(folder: Path, plane: str, step_ms: float) -> Iterator[Running]:
    """Dynamo's frontend and mockers. Their steps take about 6.9 ms with 32 requests, divided by a ratio."""
    assert plane == "tcp"
    speedup = "1000" if not step_ms else f"{6.9 / step_ms:.2f}"
    with ExitStack() as stopping:
        etcd = _etcd(folder, stopping)
        environ = os.environ | {"ETCD_ENDPOINTS": etcd.url, "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
        environ["DYN_TCP_RPC_HOST"] = "127.0.0.1"
        model, port = _with_template(folder), free_port()
        wires = ["--discovery-backend", "etcd", "--request-plane", "tcp"]
        mocker = ["dynamo.mocker", "--model-path", str(model), "--model-name", MODEL, *wires]
        mocker += [
            "--speedup-ratio",
            speedup,
            "--max-num-seqs",
            "1024",
            "--num-gpu-blocks-override",
            "200000",
        ]
        mocker += ["--no-enable-prefix-caching", "--disaggregation-mode"]
        commands = {
            "frontend": ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port), *wires],
            "prefill": [*mocker, "prefill"],
            "decode": [*mocker, "decode"],
        }
        pids = {}
        for name, arguments in commands.items():
            log = folder / f"{name}.log"
            process = Process(name, [str(_PEER_PYTHON), "-m", *arguments], log, environ)
            stopping.callback(process.kill)
            pids[name] = process.popen.pid
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: MODEL in _body(f"{url}/v1/models"))
        yield Running(url, pids)


def _etcd(folder: Path, stopping: ExitStack) -> ServerProcess:
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = ["etcd", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={url}"]
    command += [f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}"]
    command += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    return _server(command, url, folder / "etcd", b"ready to serve client requests", stopping)


def _nats(folder: Path, stopping: ExitStack) -> ServerProcess:
    port = free_port()
    command = ["nats-server", "-a", "127.0.0.1", "-p", str(port)]
    return _server(command, f"nats://127.0.0.1:{port}", folder / "nats", b"Server is ready", stopping)


def _server(command: list[str], url: str, data: Path, ready: bytes, stopping: ExitStack) -> ServerProcess:
    server = ServerProcess(command, url, data, ready=ready)
    stopping.callback(server.kill)
    server.start()
    return server


def _with_template(folder: Path) -> Path:
    """The demo model with a chat template, which Dynamo needs."""
    model = Path(shutil.copytree(_DEMO, folder / "model"))
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
    return model


def _body(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body.decode()
    except (urllib.error.URLError, OSError):
        return ""
