"""`python -m baton shares`: what divides one GPU between a prefill and a decode worker of vLLM."""

import dataclasses
import sys
from pathlib import Path

import msgspec

from baton.flags import Parsed, flag, read
from baton.model_folder import model_folder
from operations.doctor.facts import Facts
from operations.doctor.memory import SHARE, halves
from operations.doctor.probes import planned, probe_gpus, probe_model
from operations.errors import CommandError
from workers.flags import WorkerSettings
from workers.settings import OVERRIDE, SettingsError, read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShareSettings:
    """Flags of `python -m baton shares`."""

    model_path: Path = flag(Path("models/demo"), "model folder, or id in the hub's cache", metavar="FOLDER")
    gpu: str = flag("0", "the GPU, as in CUDA_VISIBLE_DEVICES", metavar="GPU")
    prefill_flags: str = flag("", "flags of the prefill worker, in quotes", metavar="FLAGS")
    decode_flags: str = flag("", "flags of the decode worker", metavar="FLAGS")
    decode_engine_args: Path | None = flag(None, "its YAML, if it names a draft model", metavar="FILE")


def shares(parsed: Parsed[ShareSettings]) -> int:
    """Print a line of flags for prefill, one for decode, and the share of the GPU's memory that PyTorch may
    take in each role, unless flags override it. Raises CommandError if the GPU is too small or cannot be
    examined."""
    try:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(parsed.settings)))
    except (ValueError, SettingsError) as error:
        raise CommandError(f"one GPU: {error}") from error
    return 0


def _lines(settings: ShareSettings) -> list[str]:
    """Raises ValueError, SettingsError."""
    gpus, problem = probe_gpus()
    workers = tuple(planned("vllm", "decode", [None], settings.decode_engine_args, settings.decode_flags))
    facts = Facts(gpus=gpus, model=probe_model(model_folder(settings.model_path)), workers=workers)
    gpu = facts.gpu(settings.gpu)
    if gpu is None:
        raise ValueError(problem or f"there is no GPU {settings.gpu} (have {facts.gpu_indices})")
    chosen = halves(facts, gpu)
    roles = [(line, _overrides(line)) for line in (settings.prefill_flags, settings.decode_flags)]
    is_ours = all(chosen.keys().isdisjoint(own) for _, own in roles)
    both = [(line.split(), msgspec.json.encode(chosen | own).decode()) for line, own in roles]
    flags = [" ".join([*words, OVERRIDE, override]) for words, override in both]
    return [*flags, str(chosen[SHARE]) if is_ours else ""]


def _overrides(line: str) -> dict[str, object]:
    """The settings that flags override."""
    given = read(WorkerSettings, line.split()).settings.override_engine_args
    own = read_json(given) if given is not None else {}
    if not isinstance(own, dict):
        raise SettingsError(f"{OVERRIDE}: must be a JSON object")
    return own
