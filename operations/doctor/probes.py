"""Reads this machine's GPUs, the model folder and workers' settings. Never raises, never waits for long."""

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import replace

from baton.connect import Wires
from baton.discovery import Discovery
from baton.etcd import EtcdDiscovery
from baton.flags import read as read_flags
from baton.messages import UNDECODABLE
from baton.model_folder import model_folder
from baton.nats import NatsTransport
from baton.transport import Transport
from operations.doctor.facts import Gpu, Model, Worker
from workers.engines.build import given_settings
from workers.engines.trtllm.settings import GUESSING as TRTLLM_GUESSING
from workers.engines.vllm.settings import GUESSING
from workers.flags import DisaggregationMode, EngineName, WorkerSettings
from workers.settings import SettingsError

TIMEOUT_S = 20
_SMI = (
    "nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)  # fmt: skip
_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 << 20
T = TypeVar("T")


def probe_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """What nvidia-smi lists, or why it lists nothing."""
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            _SMI, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return (), "nvidia-smi is not installed"
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi hangs for more than {TIMEOUT_S} s (did a GPU fall off the bus?)"
    except OSError as error:
        return (), f"nvidia-smi: {error}"
    if done.returncode == 0:
        gpus = parse_gpus(done.stdout, Path("/proc/meminfo").read_text())
        return gpus, None if gpus else "nvidia-smi lists none"
    printed = " ".join((done.stdout or done.stderr).split())
    return (), printed[:200] or f"nvidia-smi exits with status {done.returncode}"


def parse_gpus(csv: str, meminfo: str) -> tuple[Gpu, ...]:
    """Parse `--query-gpu` with `noheader,nounits`; unknown values are `[N/A]`. Other lines are skipped.
    `meminfo` is that of /proc."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE))
    own = [int(kib.get(name, 0)) << 10 for name in ("MemTotal", "MemAvailable")]
    gpus = []
    for row in ([cell.strip() for cell in line.split(",")] for line in csv.splitlines()):
        if len(row) != 5 or not row[0].isdecimal():
            continue
        index, uuid, name, *mib = row
        is_unified = not all(each.isdecimal() for each in mib)
        total, free = own if is_unified else (int(each) << 20 for each in mib)
        gpus.append(Gpu(int(index), uuid, name, total, free, is_unified))
    return tuple(gpus)


class _Config(msgspec.Struct):
    model_type: str
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def probe_model(path: Path) -> Model:
    """Read everything except the weights themselves. What is wrong with a file, its reader says."""
    with contextlib.suppress(ValueError):  # the problem is below
        path = model_folder(path)
    try:
        if not path.is_dir():
            return Model(path=str(path), problem="is not a folder, nor a model in the hub's cache")
        found = [each.name for each in path.iterdir() if each.suffix == ".safetensors"]
        config, index = _read(path / "config.json", _Config), _read(path / _INDEX, _Index)
        shards = sorted(set(index.weight_map.values())) if index else found
        wanted = ["config.json", "tokenizer.json", *(shards or ["model.safetensors"])]
        sizes = {name: _num_bytes(path / name) for name in wanted}
        return Model(
            path=str(path),
            model_type=config.model_type if config else "gpt_oss",
            num_layers=config.num_hidden_layers if config else None,
            missing=tuple(name for name, size in sizes.items() if size is None),
            weight_bytes=sum(sizes[name] or 0 for name in shards),
        )
    except OSError as error:  # an unreadable folder, a name that is too long
        return Model(path=str(path), problem=error.strerror or str(error))


def _read(path: Path, kind: type[T]) -> T | None:
    """Its content; None if there is no such file, or if it is not valid."""
    with contextlib.suppress(OSError, *UNDECODABLE):
        if (_num_bytes(path) or _MAX_JSON_BYTES + 1) <= _MAX_JSON_BYTES:
            return msgspec.json.decode(path.read_bytes(), type=kind)
    return None


def _num_bytes(path: Path) -> int | None:
    """None if it is no file: a pipe may never end."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):  # an index may name anything
        return None


async def probe_servers(wires: Wires, limit_s: float = 5.0) -> tuple[str, ...]:
    """Why etcd or NATS, where they are selected, do not serve a process with these variables; not those of
    Dynamo's runtime, which has its own clients."""
    try:
        clients: dict[str, Discovery | Transport] = {wires.registry_name(): wires.discovery()}
        clients[wires.plane_name()] = wires.transport()
    except (OSError, ValueError) as error:  # half a login, a file that is no certificate
        return (str(error),)
    found = []
    for name, client in clients.items():
        if isinstance(client, EtcdDiscovery | NatsTransport):
            wait = anext(client.watch()) if isinstance(client, EtcdDiscovery) else client.reachable()
            try:
                await asyncio.wait_for(wait, limit_s)
            except TimeoutError:
                found.append(f"{name}: {client.problem or 'no answer'}")
        await client.close()
    return tuple(found)


def planned(
    engine: EngineName, mode: DisaggregationMode, gpus: Sequence[str | None], path: Path | None, line: str
) -> list[Worker]:
    """The workers to be started, one per GPU list; `path` is their YAML, `line` their other flags."""
    argv = ["--engine", engine, "--disaggregation-mode", mode]
    argv += [f"--extra-engine-args={path}"] if path is not None else []
    worker = Worker(mode=mode)
    try:
        argv += line.split()  # as the launch scripts do
        found = given_settings(read_flags(WorkerSettings, argv))
        given = {key: value for key, (value, _) in found.items()}
        worker = replace(worker, given=given, draft_bytes=_draft_bytes(given, mode))
    except (ValueError, SettingsError) as refusal:
        worker = replace(worker, refusal=" ".join(str(refusal).split()))
    return [replace(worker, gpus=each) for each in gpus]


def _draft_bytes(given: Mapping[str, object], mode: DisaggregationMode) -> int:
    """The weights of the draft model in these settings. Raises ValueError without it where KV is handed over;
    a library may download that of an aggregated worker."""
    for model in (*TRTLLM_GUESSING.models, *GUESSING.models):
        if isinstance(path := given.get(setting := f"{GUESSING.names[0]}.{model}"), str):
            draft = probe_model(Path(path))
            if draft.problem and mode != "agg":
                raise ValueError(f"{setting}: {model_folder(Path(path))} {draft.problem}")
            return draft.weight_bytes
    return 0
