"""The workers to be started: their settings as they will read them, or why they will exit."""

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from baton.flags import read as read_flags
from baton.model_folder import model_folder
from operations.doctor.facts import Model, Worker
from operations.doctor.probes import probe_model
from workers.engines.build import given_settings
from workers.engines.trtllm.settings import GUESSING as TRTLLM_GUESSING
from workers.engines.vllm.settings import GUESSING, NAMES
from workers.flags import DisaggregationMode, EngineName, WorkerSettings
from workers.settings_text import SettingsError

_TIMEOUT_S = 300.0  # importing an engine from a slow disk
_COMMON_NAMES = {name: path for path, name in NAMES.items()}


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
        worker = replace(worker, argv=tuple(argv), given=given, draft=_draft(given))
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


def ask_worker(argv: Sequence[str]) -> str | None:
    """The error of `python -m workers --check`, if any: only the installed build knows its keys and types.
    In a subprocess, since importing an engine is slow, prints, and may end the process.
    """
    command = [sys.executable, "-m", "workers", "--check", *argv]
    try:
        done = subprocess.run(  # noqa: S603  our own program, with the worker's flags
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"reading its settings takes longer than {_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        return f"its settings cannot be read: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"it exits with status {done.returncode}"]
    errors = [line for line in lines if line.startswith("error: ")]  # an engine may print more as it exits
    return (errors or lines)[-1].removeprefix("error: ")


def with_refusals(workers: Iterable[Worker], model_path: Path) -> tuple[Worker, ...]:
    """The workers, with the errors of those that refuse their settings; runs each command line once."""
    workers = tuple(workers)
    lines = list(dict.fromkeys(worker.argv for worker in workers if worker.refusal is None))
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda argv: ask_worker([f"--model-path={model_path}", *argv]), lines)
        refusals = dict(zip(lines, answers, strict=True))
    return tuple(replace(worker, refusal=worker.refusal or refusals.get(worker.argv)) for worker in workers)
