"""Asks nvidia-smi for GPUs, links and peer access; the parsers are pure."""

import re
import subprocess

from msgspec.structs import replace

from operations.doctor.facts import Gpu, GpuHealth, Nvidia

_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap,mig.mode.current"
_HEALTH_FIELDS = (
    "index,persistence_mode,compute_mode,ecc.errors.uncorrected.volatile.total,"
    "remapped_rows.pending,remapped_rows.failure,fabric.state"
)
_TIMEOUT_S = 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_MIB = 1 << 20


def probe_gpus() -> Nvidia:
    """Call nvidia-smi four times; `problem` says why it failed. Health and topology are optional: a
    driver that does not know one of the fields refuses the whole call.
    """
    listed = _nvidia_smi(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    if isinstance(listed, OSError | subprocess.SubprocessError):
        return Nvidia(problem=_reason(listed))
    extras = _nvidia_smi(f"--query-gpu={_HEALTH_FIELDS}", "--format=csv,noheader,nounits")
    health = parse_health(extras) if isinstance(extras, str) else {}
    gpus = tuple(replace(gpu, health=health.get(gpu.index)) for gpu in parse_gpus(listed))
    links, peers = _nvidia_smi("topo", "-m"), _nvidia_smi("topo", "-p2p", "r")
    return Nvidia(
        gpus=gpus,
        links=parse_matrix(links) if isinstance(links, str) else {},
        peers=parse_matrix(peers) if isinstance(peers, str) else {},
    )


def _nvidia_smi(*arguments: str) -> str | OSError | subprocess.SubprocessError:
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            ["nvidia-smi", *arguments],  # noqa: S607  wherever the driver installed it
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return error
    return done.stdout


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, FileNotFoundError):
        return "nvidia-smi is not installed"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"nvidia-smi hangs for more than {_TIMEOUT_S} s (did a GPU fall off the bus?)"
    if isinstance(error, subprocess.CalledProcessError):
        said = " ".join((error.stdout or error.stderr or "").split())
        return said[:200] or f"nvidia-smi exits with status {error.returncode}"
    return f"nvidia-smi: {error}"


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """Parse `--query-gpu` with `noheader,nounits`; values that the driver does not know read `[N/A]`."""
    found = []
    for line in csv.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 8 or not cells[0].isdecimal():
            continue
        index, uuid, name, total, free, driver, compute, mig = cells
        major, _, minor = compute.partition(".")
        found.append(
            Gpu(
                index=int(index),
                uuid=uuid,
                name=name,
                total_bytes=_mib(total),
                free_bytes=_mib(free),
                driver=driver,
                compute=(_whole(major), _whole(minor)),
                mig=mig == "Enabled",
            )
        )
    return tuple(found)


def parse_health(csv: str) -> dict[int, GpuHealth]:
    """Parse the query of health fields, by GPU index."""
    found = {}
    for line in csv.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 7 and cells[0].isdecimal():
            _, persistence, compute, ecc, pending, failure, fabric = cells
            found[int(cells[0])] = GpuHealth(
                persistence_mode=persistence,
                compute_mode=compute,
                num_ecc_errors=int(ecc) if ecc.isdecimal() else None,
                remap_pending=pending,
                remap_failure=failure,
                fabric_state=fabric,
            )
    return found


def _mib(cell: str) -> int | None:
    return int(cell) * _MIB if cell.isdecimal() else None


def _whole(cell: str) -> int:
    return int(cell) if cell.isdecimal() else 0


def parse_matrix(table: str) -> dict[tuple[int, int], str]:
    """Parse `nvidia-smi topo -m` or `-p2p`, by GPU indices; skips network cards and affinities."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", table).splitlines():
        words = line.split()
        numbers = [_gpu_number(word) for word in words]
        if not columns:
            columns = [number for number in numbers if number is not None]
        elif words and numbers[0] is not None:
            for column, word in zip(columns, words[1:], strict=False):
                found[numbers[0], column] = word
    return found


def _gpu_number(word: str) -> int | None:
    number = re.fullmatch(r"GPU(\d+)", word)
    return int(number[1]) if number else None
