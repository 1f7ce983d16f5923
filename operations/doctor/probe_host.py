"""Reads this machine: limits, /proc, namespaces, software, and whether addresses can be bound."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from operations.doctor.facts import Host

_CAP_SYS_PTRACE = 19
_FRONTEND_PACKAGES = ("httptools", "prometheus_client", "starlette", "tokenizers", "uvicorn")
_TIMEOUT_S = 10
_VARIABLES = re.compile(
    r"(CUDA|NCCL|BATON_PEER|NVIDIA|UCX|TRTLLM|TRT_LLM)_\w+|(https?|all|no)_proxy", re.IGNORECASE
)


def probe_host() -> Host:
    """Never raises: what cannot be read counts as unlimited or absent."""
    memory = _meminfo()
    return Host(
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE, is_hard=True),
        stack_bytes=_limit(resource.RLIMIT_STACK),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,  # noqa: S108  its size
        in_container=_in_container(),
        ipc_namespace=_namespace("ipc"),
        pid_namespace=_namespace("pid"),
        ptrace_scope=_ptrace_scope(),
        can_ptrace=bool(_capabilities() >> _CAP_SYS_PTRACE & 1),
        has_tensorrt_llm=_is_installed("tensorrt_llm"),
        tensorrt_llm_version=_version("tensorrt-llm"),
        has_vllm=_is_installed("vllm"),
        has_docker=shutil.which("docker") is not None,
        docker_answers=_run("docker", "version", "--format", "{{.Server.Version}}") is not None,
        container_toolkit=_container_toolkit(),
        hf_token=_has_hf_token(),
        year=datetime.datetime.now(datetime.UTC).year,
        environment={name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)},
        network_devices=frozenset(_network_devices()),
        missing_packages=tuple(name for name in _FRONTEND_PACKAGES if not _is_installed(name)),
    )


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _network_devices() -> Iterator[str]:
    for kind in ("net", "infiniband"):
        with contextlib.suppress(OSError):
            yield from os.listdir(f"/sys/class/{kind}")


def _limit(which: int, *, is_hard: bool = False) -> int | None:
    """The soft limit, or the hard one for limits that processes raise themselves."""
    limit = resource.getrlimit(which)[is_hard]
    return None if limit == resource.RLIM_INFINITY else limit


def _meminfo() -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return any(Path(mark).exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


def _namespace(kind: str) -> int:
    try:
        number = re.search(r"\d+", os.readlink(f"/proc/self/ns/{kind}"))
    except OSError:
        return 0
    return int(number[0]) if number else 0


def _ptrace_scope() -> int | None:
    scope = _text("/proc/sys/kernel/yama/ptrace_scope").strip()
    return int(scope) if scope.isdigit() else None


def _capabilities() -> int:
    effective = re.search(r"^CapEff:\s+([0-9a-f]+)$", _text("/proc/self/status"), re.MULTILINE)
    return int(effective[1], 16) if effective else 0


def _container_toolkit() -> str | None:
    return _run("nvidia-ctk", "--version")


def _run(*command: str) -> str | None:
    """The first line of its output; None if it is not installed, fails or hangs."""
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def _has_hf_token() -> bool:
    if os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN"):
        return True
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return os.path.isfile(os.path.join(home, "token"))


def bind_problem(host: str, port: int) -> str | None:
    """Why this process could not listen there, or None. Port 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family):
            return None
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    except (OverflowError, TypeError, ValueError) as error:  # an invalid port or name
        return str(error)
