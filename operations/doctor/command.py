"""`python -m baton doctor`: parses flags, gathers the facts, prints the findings."""

import asyncio
import dataclasses
import json
import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from baton.connect import HTTP_HOST, HTTP_PORT, Wires
from baton.flags import Parsed, flag
from baton.messages import Scores
from baton.number_check import DIGEST, check_numbers
from baton.own_address import why_not_bound
from baton.telemetry import print_error
from operations.doctor.facts import Facts, Worker
from operations.doctor.probes import planned, probe_gpus, probe_model, probe_servers
from operations.doctor.table import Finding, W, findings
from workers.flags import DisaggregationMode, EngineName

_REGISTRY_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Flags of `python -m baton doctor`. GPU lists are as in CUDA_VISIBLE_DEVICES; `;` separates workers."""

    engine: EngineName = flag("trtllm", "engine of the workers")
    model_path: Path = flag(Path("models/demo"), "model folder, or id in the hub's cache", metavar="FOLDER")
    prefill_engine_args: Path | None = flag(None, "engine settings of prefill workers", metavar="YAML")
    decode_engine_args: Path | None = flag(None, "engine settings of decode workers", metavar="YAML")
    engine_args: Path | None = flag(None, "engine settings of aggregated workers", metavar="YAML")
    prefill_gpus: str | None = flag(None, "GPUs of prefill, as 0,1,2,3", metavar="LIST")
    decode_gpus: str | None = flag(None, "GPUs of decode, as 4,5,6,7", metavar="LIST")
    gpus: str | None = flag(None, "GPUs of an aggregated worker", metavar="LIST")
    prefill_flags: str = flag("", "flags of prefill workers, in quotes", metavar="FLAGS")
    decode_flags: str = flag("", "flags of decode workers", metavar="FLAGS")
    flags: str = flag("", "flags of aggregated workers", metavar="FLAGS")
    http_port: int = flag(8000, "the frontend's", env=HTTP_PORT, metavar="PORT", at_least=0, at_most=65535)
    http_host: str = flag("127.0.0.1", "address of the frontend", env=HTTP_HOST, metavar="IP")
    json: bool = flag(False, "findings as JSON")
    record: Path | None = flag(None, "only write the workers' --trusted-numbers", metavar="FILE")
    wires: Wires = dataclasses.field(default_factory=Wires)


def text(found: Sequence[Finding]) -> str:
    """The report for humans: three aligned lines per finding, and the count."""
    lines = []
    for it in found:
        lines += [f"{it.severity:<8} {it.fact}  [{it.code}]"]
        lines += [f"{'breaks':>8} {it.breaks}", f"{'repair':>8} {it.repair}"]
    counts = Counter(finding.severity for finding in found)
    count = ", ".join(f"{num} {severity}{'s' * (num > 1)}" for severity, num in counts.items())
    return "\n".join([*lines, f"{'result':<8} {count or 'nothing found'}"]) + "\n"


def doctor(parsed: Parsed[DoctorSettings]) -> int:
    """Report what would break. Exit status: 0 nothing, 1 warnings only, 2 errors (or a bad flag)."""
    settings = parsed.settings
    if settings.record is not None:
        return _record(settings.record, settings.wires)
    found = findings(gather(settings))
    as_json = json.dumps({"findings": msgspec.to_builtins(found)}, indent=2) + "\n"
    sys.stdout.write(as_json if settings.json else text(found))
    return max((1 if finding.severity == W else 2 for finding in found), default=0)


def gather(settings: DoctorSettings) -> Facts:
    """Run all probes. Takes a second or two; longer if a server does not answer."""
    gpus, gpu_problem = probe_gpus()
    yamls = f"{settings.prefill_engine_args} {settings.decode_engine_args} {settings.engine_args}"
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        gpus=gpus,
        gpu_problem=gpu_problem,
        model=msgspec.structs.replace(probe_model(settings.model_path), settings=yamls),
        workers=tuple(wanted_workers(settings, os.environ.get("CUDA_VISIBLE_DEVICES"))),
        engine=settings.engine,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,  # noqa: S108  its size
        http_port=settings.http_port,
        port_problem=why_not_bound(settings.http_host, settings.http_port),
        servers=asyncio.run(probe_servers(settings.wires)),
    )


def wanted_workers(settings: DoctorSettings, visible_devices: str | None) -> Iterator[Worker]:
    """The workers that the flags describe; by default one aggregated worker on CUDA_VISIBLE_DEVICES."""
    s = settings
    rows: tuple[tuple[DisaggregationMode, str | None, Path | None, str], ...] = (
        ("prefill", s.prefill_gpus, s.prefill_engine_args, s.prefill_flags),
        ("decode", s.decode_gpus, s.decode_engine_args, s.decode_flags),
        ("agg", s.gpus, s.engine_args, s.flags),
    )
    wanted = [row for row in rows if row[1:] != (None, None, "")]
    for mode, gpus, path, line in wanted or rows[2:]:
        lists = gpus.split(";") if gpus is not None else [visible_devices or None]
        yield from planned(s.engine, mode, lists, path, line)


def _record(path: Path, wires: Wires) -> int:
    """Write the scores of the registered workers, by model. Exit status: 0, 2 if there are none, if they
    differ, or if the file cannot be written."""
    try:
        wires.check()
        scores = asyncio.run(_agreed(wires))
        path.write_bytes(msgspec.json.encode(scores))
    except (OSError, ValueError) as error:
        print_error(f"--record {path}: {str(error) or 'the registry does not answer'}")
        return 2
    sys.stdout.write(f"{path}: {', '.join(scores)}\n")
    return 0


async def _agreed(wires: Wires) -> dict[str, Scores]:
    """Raises ValueError if workers of one model differ, or if none has scores."""
    discovery = wires.discovery()
    try:
        workers = await asyncio.wait_for(anext(discovery.watch()), _REGISTRY_S)
    finally:
        await discovery.close()
    (refused, doubts), labels = check_numbers(workers, {}), {w.address: w.label for w in workers}
    if problems := [*doubts, *(f"{labels[where]}: {why}" for where, why in refused.items())]:
        raise ValueError("; ".join(problems))
    scores = {w.model: w.scores for w in workers if w.scores and w.scores.prompts == DIGEST}
    if not scores:
        raise ValueError(f"no worker with numbers is in {wires.registry_name()}; start one, or name another")
    return scores
