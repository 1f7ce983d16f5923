"""Selects the engine if --engine is missing, by the installed packages."""

import dataclasses
import importlib.util
from collections.abc import Callable

from baton.flags import Parsed
from workers.flags import EngineName, WorkerSettings
from workers.settings_text import SettingsError

CHOSEN = "chosen"  # the source of an engine that was not given

# In order of preference. Not the mocker, which generates no real answers and must be requested.
_PACKAGES: dict[EngineName, str] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "embedded": "transformers"}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def with_engine(
    parsed: Parsed[WorkerSettings], is_installed: Callable[[str], bool] = _is_installed
) -> Parsed[WorkerSettings]:
    """The settings with the given engine, or else the first that is installed; between TensorRT-LLM and vLLM
    the user has to choose. Raises SettingsError.
    """
    if parsed.settings.engine is not None:
        return parsed
    installed = [name for name, package in _PACKAGES.items() if is_installed(package)]
    if not installed:
        raise SettingsError(
            "no engine is installed: run this in the worker image (deploy/README.md), or "
            "pip install '.[vllm]' or '.[embedded]'"
        )
    if {"trtllm", "vllm"} <= set(installed):
        raise SettingsError("TensorRT-LLM and vLLM are both installed; set --engine trtllm or --engine vllm")
    settings = dataclasses.replace(parsed.settings, engine=installed[0])
    return Parsed(settings, parsed.sources | {"engine": CHOSEN})
