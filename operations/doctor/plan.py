"""The workers to be started: their settings as they will read them, or why they will exit."""

import contextlib
from collections.abc import Mapping, Sequence
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
