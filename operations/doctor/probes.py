"""Reads this machine, its GPUs and the model folder. Nothing here raises, or waits for a tool that hangs."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from baton.model_folder import snapshot_in
from operations.doctor.facts import Gpu, Host, Model, Nvidia, Shape, Shard

TIMEOUT_S = 20
_CAP_SYS_PTRACE = 19
_FRONTEND_PACKAGES = ("httptools", "starlette", "tokenizers", "uvicorn")
_VARIABLES = re.compile(
    r"(CUDA|NCCL|BATON_PEER|NVIDIA|UCX|TRTLLM|TRT_LLM)_\w+|(https?|all|no)_proxy", re.IGNORECASE
)
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap,mig.mode.current"
_HEALTH_FIELDS = (
    "index,persistence_mode,compute_mode,ecc.errors.uncorrected.volatile.total,"
    "remapped_rows.pending,remapped_rows.failure,fabric.state"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


# This machine


def probe_host() -> Host:
    """What cannot be read counts as unlimited or absent."""
    memory = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    }
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)$", _text("/proc/self/status"), re.MULTILINE)
    scope = _text("/proc/sys/kernel/yama/ptrace_scope").strip()
    toolkit = _output("nvidia-ctk", "--version")
    return Host(
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        nofile=_limit(resource.RLIMIT_NOFILE, is_hard=True),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,  # noqa: S108  its size
        in_container=_in_container(),
        ipc_namespace=_namespace("ipc"),
        pid_namespace=_namespace("pid"),
        ptrace_scope=int(scope) if scope.isdigit() else None,
        can_ptrace=bool(capabilities and int(capabilities[1], 16) >> _CAP_SYS_PTRACE & 1),
        has_tensorrt_llm=_is_installed("tensorrt_llm"),
        tensorrt_llm_version=_version("tensorrt-llm"),
        has_vllm=_is_installed("vllm"),
        has_docker=shutil.which("docker") is not None,
        container_toolkit=toolkit.strip() if isinstance(toolkit, str) else None,
        environment={name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)},
        missing_packages=tuple(name for name in _FRONTEND_PACKAGES if not _is_installed(name)),
    )


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


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(distribution: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def _limit(which: int, *, is_hard: bool = False) -> int | None:
    """The soft limit, or the hard one for limits that processes raise themselves."""
    limit = resource.getrlimit(which)[is_hard]
    return None if limit == resource.RLIM_INFINITY else limit


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return ""


def _in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return any(Path(mark).exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


def _namespace(kind: str) -> int:
    with contextlib.suppress(OSError):
        number = re.search(r"\d+", os.readlink(f"/proc/self/ns/{kind}"))
        return int(number[0]) if number else 0
    return 0


def _output(*command: str) -> str | OSError | subprocess.SubprocessError:
    try:
        return subprocess.run(  # noqa: S603  our own arguments
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return error


# Its GPUs


def probe_gpus() -> Nvidia:
    """Call nvidia-smi four times; `problem` says why it failed. Health and topology are optional: a
    driver that does not support one of the fields refuses the whole call.
    """
    listed = _output("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if not isinstance(listed, str):
        return Nvidia(problem=_reason(listed))
    extras = _output("nvidia-smi", f"--query-gpu={_HEALTH_FIELDS}", "--format=csv,noheader,nounits")
    links, peers = _output("nvidia-smi", "topo", "-m"), _output("nvidia-smi", "topo", "-p2p", "r")
    return Nvidia(
        gpus=parse_gpus(listed, extras if isinstance(extras, str) else ""),
        links=parse_matrix(links) if isinstance(links, str) else {},
        peers=parse_matrix(peers) if isinstance(peers, str) else {},
    )


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, FileNotFoundError):
        return "nvidia-smi is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi hangs for more than {TIMEOUT_S} s (did a GPU fall off the bus?)"
    if isinstance(error, subprocess.CalledProcessError):
        printed = " ".join((error.stdout or error.stderr or "").split())
        return printed[:200] or f"nvidia-smi exits with status {error.returncode}"
    return f"nvidia-smi: {error}"


def parse_gpus(csv: str, health: str = "") -> tuple[Gpu, ...]:
    """Parse two `--query-gpu` with `noheader,nounits`; unknown values are `[N/A]`."""
    found = []
    states = {row[0]: row[1:] for row in _rows(health, 7)}
    for index, uuid, name, total, free, driver, compute, mig in _rows(csv, 8):
        major, _, minor = compute.partition(".")
        gpu = Gpu(
            index=int(index),
            uuid=uuid,
            name=name,
            total_bytes=int(total) << 20 if total.isdecimal() else None,
            free_bytes=int(free) << 20 if free.isdecimal() else None,
            driver=driver,
            compute=(int(major) if major.isdecimal() else 0, int(minor) if minor.isdecimal() else 0),
            mig=mig == "Enabled",
        )
        if index in states:
            persistence, mode, ecc, pending, failure, fabric = states[index]
            gpu = replace(
                gpu,
                persistence_mode=persistence,
                compute_mode=mode,
                num_ecc_errors=int(ecc) if ecc.isdecimal() else None,
                remap_pending=pending,
                remap_failure=failure,
                fabric_state=fabric,
            )
        found.append(gpu)
    return tuple(found)


def _rows(csv: str, num_cells: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    return [row for row in rows if len(row) == num_cells and row[0].isdecimal()]


def parse_matrix(table: str) -> dict[tuple[int, int], str]:
    """Parse `nvidia-smi topo -m` or `-p2p`, by GPU indices; skips network cards and affinities."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", table).splitlines():
        words = line.split()
        numbers = [int(word[3:]) if re.fullmatch(r"GPU\d+", word) else None for word in words]
        if not columns:
            columns = [number for number in numbers if number is not None]
        elif numbers and numbers[0] is not None:
            row = numbers[0]
            found |= {(row, column): word for column, word in zip(columns, words[1:], strict=False)}
    return found


# The model


class _Config(msgspec.Struct):
    model_type: str
    num_hidden_layers: _Count
    num_attention_heads: _Count
    num_key_value_heads: _Count
    max_position_embeddings: _Count
    head_dim: _Count | None = None
    hidden_size: _Count = 1
    num_local_experts: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)] = 0
    dtype: str | None = None
    torch_dtype: str | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw


def probe_model(path: Path) -> Model:
    """Read everything except the weights themselves."""
    try:
        return _model(path) if path.is_dir() else Model(path=str(path), is_folder=False)
    except OSError as error:  # an unreadable folder, a name that is too long
        return Model(path=str(path), is_folder=False, folder_problem=error.strerror or str(error))


def _model(path: Path) -> Model:
    config, config_problem = _read(path / "config.json", _Config)
    index, index_problem = _read(path / _INDEX, _Index)
    _, tokenizer_problem = _read(path / "tokenizer.json", _Tokenizer)
    names = set(index.weight_map.values()) if index else {p.name for p in path.glob("*.safetensors")}
    return Model(
        path=str(path),
        is_folder=True,
        snapshot=str(snapshot_in(path) or "") or None,
        files=frozenset(p.name for p in path.iterdir() if p.is_file()),
        shape=_shape(config) if config else None,
        config_problem=config_problem,
        index_problem=index_problem,
        tokenizer_problem=tokenizer_problem,
        shards=tuple(_shard(path, name) for name in sorted(names)),
    )


def _read(path: Path, kind: type[Any]) -> tuple[Any, str | None]:
    """(content, None) or (None, problem); (None, None) if there is no such file."""
    if not path.is_file():  # a pipe may never end
        return None, None
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return None, f"larger than {_MAX_JSON_BYTES} bytes"
        return msgspec.json.decode(path.read_bytes(), type=kind), None
    except OSError as error:
        return None, error.strerror or str(error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return None, str(error)


def _shape(config: _Config) -> Shape:
    return Shape(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or max(1, config.hidden_size // config.num_attention_heads),
        num_experts=config.num_local_experts,
        max_positions=config.max_position_embeddings,
        dtype_bytes=_DTYPE_BYTES.get(config.dtype or config.torch_dtype or "bfloat16", 2),
    )


def _shard(folder: Path, name: str) -> Shard:
    path = folder / name
    with contextlib.suppress(OSError):  # not readable, or the name is invalid
        if "/" not in name and path.is_file():
            return Shard(name=name, size_bytes=path.stat().st_size, whole_bytes=_promised_bytes(path))
    return Shard(name=name, size_bytes=None, whole_bytes=None)


def _promised_bytes(path: Path) -> int | None:
    """The file size that a safetensors header implies: 8 + header + the end of the last tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MAX_HEADER_BYTES:
            return None
        try:
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return None
    return 8 + length + max(ends, default=0)
