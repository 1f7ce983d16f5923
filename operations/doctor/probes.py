"""Reads this machine, its GPUs, model folder and workers' settings. Never raises, never waits for long."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from baton.flags import read as read_flags
from baton.model_folder import model_folder
from operations.doctor.facts import INDEX, Gpu, Host, Model, Nvidia, Shape, Shard, Worker
from workers.engines.build import given_settings
from workers.engines.trtllm.settings import GUESSING as TRTLLM_GUESSING
from workers.engines.vllm.settings import GUESSING, NAMES
from workers.flags import DisaggregationMode, EngineName, WorkerSettings
from workers.settings import SettingsError

TIMEOUT_S = 20
_VARIABLES = ("UCX_TLS",)
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap"
_MAX_JSON_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
_COMMON_NAMES = {name: path for path, name in NAMES.items()}
T = TypeVar("T")


# This machine


def probe_host() -> Host:
    """What cannot be read counts as unlimited or absent."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    memory = {name: int(kib) * 1024 for name, kib in found}
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Host(
        memory_bytes=memory.get("MemTotal", 0),
        memory_free_bytes=memory.get("MemAvailable", 0),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,  # noqa: S108  its size
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _run(program: str, *arguments: str) -> tuple[str, str | None]:
    """What it prints, and why it failed, if it did."""
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            [program, *arguments],
            capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "", f"{program} is not installed"
    except subprocess.TimeoutExpired:
        return "", f"{program} hangs for more than {TIMEOUT_S} s (did a GPU fall off the bus?)"
    except OSError as error:
        return "", f"{program}: {error}"
    if done.returncode == 0:
        return done.stdout, None
    printed = " ".join((done.stdout or done.stderr).split())
    return "", printed[:200] or f"{program} exits with status {done.returncode}"


# Its GPUs


def probe_gpus() -> Nvidia:
    """What nvidia-smi lists; `problem` says why it failed."""
    listed, problem = _run("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    return Nvidia(gpus=parse_gpus(listed), problem=problem)


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """Parse `--query-gpu` with `noheader,nounits`; unknown values are `[N/A]`. Other lines are skipped."""
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    return tuple(_gpu(*row) for row in rows if len(row) == 7 and row[0].isdecimal())


def _gpu(index: str, uuid: str, name: str, total: str, free: str, driver: str, compute: str) -> Gpu:  # noqa: PLR0917  a row
    total_bytes, free_bytes = (int(mib) << 20 if mib.isdecimal() else None for mib in (total, free))
    major, minor = (int(part) if part.isdecimal() else 0 for part in f"{compute}.".split(".")[:2])
    return Gpu(int(index), uuid, name, total_bytes, free_bytes, driver, (major, minor))


# The model


class _Header(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)  # of a tensor; `__metadata__` has none


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tokenizer(msgspec.Struct):
    model: msgspec.Raw


def probe_model(path: Path) -> Model:
    """Read everything except the weights themselves."""
    bad_files: dict[str, str] = {}
    try:
        if not path.is_dir():
            return Model(path=str(path), is_folder=False)
        shape = _read(path / "config.json", Shape, bad_files)
        index = _read(path / INDEX, _Index, bad_files)
        _read(path / "tokenizer.json", _Tokenizer, bad_files)
        names = set(index.weight_map.values()) if index else {p.name for p in path.glob("*.safetensors")}
        return Model(
            path=str(path),
            is_folder=True,
            files=frozenset(p.name for p in path.iterdir() if p.is_file()),
            shape=shape,
            bad_files=bad_files,
            shards=tuple(_shard(path, name) for name in sorted(names)),
        )
    except OSError as error:  # an unreadable folder, a name that is too long
        return Model(path=str(path), is_folder=False, folder_problem=error.strerror or str(error))


def _read(path: Path, kind: type[T], bad_files: dict[str, str]) -> T | None:
    """Its content; None if there is no such file, or if `bad_files` gets what is wrong with it."""
    if not path.is_file():  # a pipe may never end
        return None
    try:
        if path.stat().st_size <= _MAX_JSON_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        bad_files[path.name] = f"larger than {_MAX_JSON_BYTES} bytes"
    except OSError as error:
        bad_files[path.name] = error.strerror or str(error)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        bad_files[path.name] = str(error)
    return None


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
            header = msgspec.json.decode(file.read(length), type=dict[str, _Header])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
    return 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0)


# The workers to be started


def planned(
    engine: EngineName, mode: DisaggregationMode, gpus: Sequence[str | None], path: Path | None, line: str
) -> list[Worker]:
    """One worker per GPU list; `path` is their YAML, `line` their other flags."""
    argv = ["--engine", engine, "--disaggregation-mode", mode]
    argv += [f"--extra-engine-args={path}"] if path is not None else []
    worker = Worker(mode=mode)
    try:
        argv += line.split()  # as the launch scripts do
        found = given_settings(read_flags(WorkerSettings, argv))
        # Settings that all engines share have vLLM's names there, and the flags' names here.
        given = {_COMMON_NAMES.get(key, key): value for key, (value, _) in found.items()}
        worker = replace(worker, given=given, draft=_draft(given))
    except (ValueError, SettingsError) as refusal:
        worker = replace(worker, refusal=" ".join(str(refusal).split()))
    return [replace(worker, gpus=each) for each in gpus]


def _draft(given: Mapping[str, object]) -> Model | None:
    """The draft model in these settings."""
    for guessing in (TRTLLM_GUESSING, GUESSING):
        if isinstance(path := given.get(f"{guessing.names[0]}.{guessing.model}"), str):
            with contextlib.suppress(ValueError):  # it is not here: the worker refuses it
                return probe_model(model_folder(Path(path)))
    return None
