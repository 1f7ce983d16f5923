"""The workers to be started: their settings as they will read them, or why they refuse them."""

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from baton.flags import read as read_flags
from operations.doctor.facts import Worker
from workers.engines.given import given_settings
from workers.engines.vllm.settings import NAMES
from workers.flags import DisaggregationMode, EngineName, WorkerSettings
from workers.settings import Given, read
from workers.settings_text import SettingsError

_TIMEOUT_S = 300.0  # importing an engine from a slow disk
_COMMON_NAMES = {name: path for path, name in NAMES.items()}


def planned(
    engine: EngineName, mode: DisaggregationMode, gpus: Sequence[str | None], path: Path | None, line: str
) -> list[Worker]:
    """One worker for each list of GPUs; `path` is their YAML, `line` what else is typed to them."""
    argv = ["--engine", engine, "--disaggregation-mode", mode]
    argv += [f"--extra-engine-args={path}"] if path is not None else []
    worker = Worker(mode=mode)
    try:
        argv += shlex.split(line)
        given = given_settings(read_flags(WorkerSettings, argv))
        overruled = _commonly_named(_overruled(given, path))
        worker = replace(worker, argv=tuple(argv), given=_commonly_named(given), overruled=overruled)
    except (ValueError, SettingsError) as refusal:
        worker = replace(worker, refusal=" ".join(str(refusal).split()))
    return [replace(worker, gpus=each) for each in gpus]


def _commonly_named(given: Given) -> Given:
    """vLLM's own names of what all engines have, as the flags name them."""
    return {_COMMON_NAMES.get(path, path): value for path, value in given.items()}


def _overruled(given: Given, path: Path | None) -> Given:
    """Where the file differs from a typed flag: what it says."""
    file = read(None, path, {}) if path is not None else {}
    return {
        key: file[key]
        for key, (value, source) in given.items()
        if source == "flag" and key in file and file[key][0] != value
    }


Ask = Callable[[Sequence[str]], str | None]


def ask_worker(argv: Sequence[str]) -> str | None:
    """What `python -m workers --check` refuses: only the installed build knows its keys and their types. In
    a process of its own, as importing an engine takes long, prints, and may end it.
    """
    command = [sys.executable, "-m", "workers", "--check", *argv]
    try:
        done = subprocess.run(  # noqa: S603  our own process, with the flags that it is to be started with
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its settings are not read within {_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return f"its settings cannot be read: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"it ends with status {done.returncode}"]
    errors = [line for line in lines if line.startswith("error: ")]  # an engine may print more at its end
    return (errors or lines)[-1].removeprefix("error: ")


def with_refusals(workers: Iterable[Worker], model_path: Path, ask: Ask = ask_worker) -> tuple[Worker, ...]:
    """The workers, those that refuse their settings with the reason; each command line is asked once."""
    workers = tuple(workers)
    lines = list(dict.fromkeys(worker.argv for worker in workers if worker.refusal is None))
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda argv: ask([f"--model-path={model_path}", *argv]), lines)
        refusals = dict(zip(lines, answers, strict=True))
    return tuple(replace(worker, refusal=worker.refusal or refusals.get(worker.argv)) for worker in workers)
